"""The whole demo, every job a Slurm job: the tables of the local run. By hand: make test-slurm."""

import json
import time
from datetime import datetime

import pytest
import yaml
from runs import ROOT, SlurmRun, checkout, results, run_here


@pytest.fixture(scope="module")
def config():
    return yaml.safe_load((ROOT / "config/demo.yaml").read_text())


@pytest.fixture(scope="module")
def through_slurm(cluster, config, tmp_path_factory):
    run = SlurmRun(checkout(tmp_path_factory.mktemp("demo") / "slurm", config), cluster, jobs=6)
    began = time.monotonic()
    run.start()
    assert run.wait(7200) == 0, run.log
    say_what_it_took(run, time.monotonic() - began)
    return run


def say_what_it_took(run, seconds):
    jobs = {job["JobId"]: job for job in run.cluster.ended()}
    spent, worked = [], []
    for path in run.folder.glob("results/demo/**/*.provenance.json"):
        made = json.loads(path.read_text())
        job = jobs[made["slurm_job"]]
        start, end = (datetime.fromisoformat(job[name]) for name in ("StartTime", "EndTime"))
        spent.append((end - start).total_seconds())
        worked.append(made["seconds"])
    print(
        f"\n{len(spent)} jobs in {seconds:.0f} s; mean of a job in Slurm"
        f" {sum(spent) / len(spent):.1f} s, of that its work {sum(worked) / len(worked):.1f} s"
    )


def test_every_job_was_one_of_slurm(through_slurm):
    beside = [*through_slurm.folder.glob("results/demo/**/*.provenance.json")]
    assert beside
    assert all(json.loads(path.read_text())["slurm_job"] for path in beside)
    assert (through_slurm.folder / "results/demo/report.html").is_file()


def test_its_results_are_those_of_the_local_run(through_slurm, config, tmp_path):
    here = checkout(tmp_path / "here", config)
    run_here(here)
    assert untimed(through_slurm.folder) == untimed(here)


def untimed(folder):
    found = {name: one for name, one in results(folder, "demo").items() if "_speed." not in name}
    assert any(name.startswith("tables/") for name in found)
    return found
