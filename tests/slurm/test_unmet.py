"""What this Slurm can never run is named before a run, and while it goes on."""

import subprocess
import sys

import pytest
from runs import SlurmRun, checkout
from small import RUN, small


@pytest.fixture
def five_minutes(cluster):
    """A partition that allows less time than any rule asks for."""
    cluster.run("scontrol", "create", "partition=short", "nodes=node1", "maxtime=5")
    yield
    cluster.run("scancel", "--partition=short")
    cluster.wait(lambda: not cluster.run("squeue", "-h"), "jobs that end")
    cluster.run("scontrol", "delete", "partition=short")


def test_what_never_runs_is_named_and_not_tried_again(cluster, five_minutes, tmp_path):
    run = SlurmRun(checkout(tmp_path / RUN, small(steps=2, recovery=40)), cluster)
    # Time is not looked at when a job is submitted here (EnforcePartLimits=NO); GPUs always are.
    run.start(
        f"results/{RUN}/text/training.jsonl", "preflight",
        default_resources={"nodes": 1, "slurm_partition": "short"},
        set_resources={"preflight_shape": {"gpu_model": "a100", "runtime": "2 * attempt"}},
    )  # fmt: skip
    try:
        checked = subprocess.run(
            [sys.executable, "-m", "reproduction.cli", "check", "--profile=profiles/tested"],
            cwd=run.folder, env=run.environment(), capture_output=True, text=True,
        )  # fmt: skip
        run.until(lambda: "will never start" in run.log, "a word about the job", seconds=120)
    finally:
        run.stop()

    assert checked.returncode == 1, checked.stdout + checked.stderr
    said = {rule: [] for rule in ("preflight_shape", "text")}
    for line in checked.stdout.splitlines():
        place, rules, *_ = [*line.split(": "), ""]
        for rule in said.keys() & rules.split(", "):
            assert place.startswith("profiles/tested/config.yaml:")
            said[rule].append(line)
    kind, time = said["preflight_shape"]
    assert "asks for a GPU of kind a100, partition short has h100" in kind
    assert "attempt 3 asks for 6 min, partition short allows 5 min" in time  # 2 at the first
    assert "asks for 10 min, partition short allows 5 min" in said["text"][0], said

    assert "(rule text; 10:00 in partition short): will never start, Partition" in run.log
    assert run.log.count("Error in rule preflight_shape") == 2  # two shapes, one attempt each
    assert "It is not tried again" in run.log
    assert "Trying to restart" not in run.log
