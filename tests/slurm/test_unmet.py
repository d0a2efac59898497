"""What this Slurm can never run is named before a run."""

import re
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


def test_what_can_never_run_is_named_by_rule_and_resource(cluster, five_minutes, tmp_path):
    run = SlurmRun(checkout(tmp_path / RUN, small(steps=2, recovery=40)), cluster)
    run.write_profile(
        default_resources={"nodes": 1, "slurm_partition": "short"},
        set_resources={"preflight_shape": {"gpu_model": "a100", "runtime": "2 * attempt"}},
    )
    checked = subprocess.run(
        [sys.executable, "-m", "reproduction.cli", "check", "--profile=profiles/tested"],
        cwd=run.folder, env=run.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 1, checked.stdout + checked.stderr
    found = checked.stdout
    place = "profiles/tested: preflight_shape"
    assert f"{place}: gpu_model: asks for a GPU of kind a100, partition short has h100" in found
    assert f"{place}: runtime: attempt 3 asks for 6 min, partition short allows 5 min" in found
    assert re.search(r"\btext\b.*: runtime: asks for 10 min, partition short allows 5 min", found)
