"""The whole demo, every job a Slurm job: the tables of the local run. By hand: make test-slurm."""

import json

import pytest
import yaml
from runs import ROOT, SlurmRun, checkout, results, run_here

HOURS = 4 * 3600.0  # the two cores of a small machine may have other work


@pytest.fixture(scope="module")
def config():
    return yaml.safe_load((ROOT / "config/demo.yaml").read_text())


@pytest.fixture(scope="module")
def through_slurm(cluster, config, tmp_path_factory):
    # More jobs than can run, so that Slurm has the next one when one ends, before Snakemake asks.
    run = SlurmRun(checkout(tmp_path_factory.mktemp("demo") / "slurm", config), cluster, jobs=12)
    try:
        assert run.start().wait(HOURS) == 0, run.log
    finally:
        run.stop()
    return run


@pytest.fixture(scope="module")
def made(through_slurm):
    """What stands beside the output of every job of Slurm: all but a PDF, made by Snakemake."""
    beside = through_slurm.folder.glob("results/demo/**/*.provenance.json")
    found = [json.loads(path.read_text()) for path in beside]
    assert {one["rule"] for one in found if one["slurm_job"] is None} <= {"document"}
    return [one for one in found if one["slurm_job"] is not None]


def test_every_job_was_one_of_slurm_and_ran_once(through_slurm, made):
    ended = through_slurm.ended()
    assert {job["JobState"] for job in ended} == {"COMPLETED"}
    assert sorted(job["JobId"] for job in ended) == sorted(one["slurm_job"] for one in made)
    assert (through_slurm.folder / "results/demo/report.html").is_file()


def test_its_results_are_those_of_the_local_run(through_slurm, config, tmp_path):
    here = checkout(tmp_path / "here", config)
    run_here(here)
    assert untimed(through_slurm.folder) == untimed(here)


def untimed(folder):
    found = {name: one for name, one in results(folder, "demo").items() if "_speed." not in name}
    assert any(name.startswith("tables/") for name in found)
    return found
