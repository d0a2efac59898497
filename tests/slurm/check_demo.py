"""The whole demo, every job a Slurm job: the tables of the local run. By hand: make test-slurm."""

import json
import re
from datetime import datetime
from statistics import mean

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


def test_what_snakemake_and_slurm_add_can_be_told(through_slurm, made, capsys):
    rows = [(one["rule"], *spent(one, through_slurm)) for one in made]
    rules = {rule: [row[1:] for row in rows if row[0] == rule] for rule, *_ in rows}
    lines = [line(rule, found) for rule, found in sorted(rules.items())]
    took = re.findall(r"^Elapsed time: (\S+)$", through_slurm.log, re.MULTILINE)[-1]
    with capsys.disabled():
        print(f"\n{len(rows)} jobs in {took} hours; means, in seconds:")
        print("| rule | jobs | in the queue | in Slurm | its script | added | seen after |")
        print("|---|---|---|---|---|---|---|", *lines, line("all", [row[1:] for row in rows]),
              sep="\n")  # fmt: skip
    assert all(script <= inside + 1 for _, _, inside, script, _ in rows)  # Slurm's are whole


def spent(one, run):
    """Seconds in the queue, in Slurm, of that in the script, and until Snakemake saw the end."""
    job = next(job for job in run.ended() if job["JobId"] == one["slurm_job"])
    submitted, began, ended = (
        datetime.fromisoformat(job[name]) for name in ("SubmitTime", "StartTime", "EndTime")
    )
    number = re.search(rf"^Job (\d+) has been submitted with SLURM jobid {job['JobId']} ",
                       run.log, re.MULTILINE)[1]  # fmt: skip
    seen = re.search(rf"^\[(.+)\]\nFinished jobid: {number} ", run.log, re.MULTILINE)[1]
    return (
        (began - submitted).total_seconds(),
        (ended - began).total_seconds(),
        one["seconds"],
        (datetime.strptime(seen, "%a %b %d %H:%M:%S %Y") - ended).total_seconds(),
    )


def line(rule, found):
    queued, inside, script, seen = map(mean, zip(*found, strict=True))
    return (
        f"| {rule} | {len(found)} | {queued:.1f} | {inside:.1f} | {script:.1f}"
        f" | {inside - script:.1f} | {seen:.1f} |"
    )


def test_its_results_are_those_of_the_local_run(through_slurm, config, tmp_path):
    here = checkout(tmp_path / "here", config)
    run_here(here)
    assert untimed(through_slurm.folder) == untimed(here)


def untimed(folder):
    found = {name: one for name, one in results(folder, "demo").items() if "_speed." not in name}
    assert any(name.startswith("tables/") for name in found)
    return found
