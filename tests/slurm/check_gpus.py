"""GPUs as Slurm hands them out. By hand: make test-slurm."""

import re
from datetime import datetime

import pytest
from cluster import GPUS, NODES
from runs import SlurmRun, checkout
from small import small

SNAKEFILE = """\
rule all:
    default_target: True
    input: "both", [f"{i}.one" for i in range(8)]

rule both:
    output: "both"
    resources: gpu=2, mem_mb=100, runtime=5
    shell: "echo $CUDA_VISIBLE_DEVICES >> seen; sleep 5; touch {output}"

rule one:
    output: "{i}.one"
    resources: gpu=1, mem_mb=100, runtime=5
    shell: "echo $CUDA_VISIBLE_DEVICES > {output}; sleep 5"
"""


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory):
    folder = checkout(tmp_path_factory.mktemp("gpus") / "run", small(steps=2, recovery=2))
    (folder / "workflow" / "Snakefile").write_text(SNAKEFILE)
    run = SlurmRun(folder, cluster, jobs=9).start()
    assert run.wait() == 0, run.log
    return run


def test_a_rule_with_two_gpus_runs_once_and_sees_both(run):
    assert (run.folder / "seen").read_text() == "0,1\n"


def test_a_rule_with_one_gpu_sees_one(run):
    seen = {path.read_text().strip() for path in run.folder.glob("*.one")}
    assert seen <= {"0", "1"}


def test_there_are_never_more_jobs_than_gpus(run):
    """From what Slurm wrote down of each job: when it ran, and where."""
    rules = dict(re.findall(r"SLURM jobid (\d+) \(log: \S+/rule_(\w+?)/", run.log))
    assert sorted(rules.values()) == ["both", *["one"] * 8]
    jobs = run.ended()
    times = {job["JobId"]: (at(job["StartTime"]), at(job["EndTime"])) for job in jobs}
    busiest = []
    for node in NODES:
        taken = [
            sum(
                GPUS if rules[job["JobId"]] == "both" else 1
                for job in jobs
                if job["NodeList"] == node
                and times[job["JobId"]][0] <= moment < times[job["JobId"]][1]
            )
            for moment, _ in times.values()
        ]
        busiest.append(max(taken))
    assert busiest == [GPUS] * len(NODES)  # never more, and they were all in use


def at(time):
    return datetime.fromisoformat(time)
