"""The profile for Slurm, on a machine with or without it."""

from pathlib import Path

import pytest
import yaml

from reproduction.plan.graph import read_graph
from reproduction.plan.resources import resource_table

ROOT = Path(__file__).parents[1]
PROFILE = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())


@pytest.fixture(scope="module")
def jobs():
    with pytest.MonkeyPatch.context() as here:
        here.chdir(ROOT)
        # What is left to run does not matter, all jobs are there.
        return read_graph(profile="profiles/slurm").jobs


def test_it_runs_the_paper(jobs):
    assert PROFILE["configfile"] == "config/paper.yaml"
    assert any(path.startswith("results/paper/") for job in jobs for path in job.outputs)


def test_the_documentation_says_what_is_asked_of_slurm(jobs):
    # The PDF is made only where there is a LaTeX.
    table = resource_table([job for job in jobs if job.rule != "pdf"])
    assert table in (ROOT / "docs/slurm.md").read_text()


def test_every_rule_with_gpus_has_memory_time_and_a_kind_of_gpu(jobs):
    asked = PROFILE["set-resources"]
    with_gpus = {job.rule for job in jobs if job.gpus} | {"refit"}  # which the paper does not have
    assert with_gpus == {rule for rule, one in asked.items() if "gpu_model" in one}
    for one in asked.values():
        assert one["mem_mb"].endswith("* attempt")


def test_only_what_goes_on_in_the_queue_has_the_same_time_at_each_attempt():
    constant = {
        rule for rule, one in PROFILE["set-resources"].items() if isinstance(one["runtime"], int)
    }
    assert constant == {"pretrain", "recover"}


def test_every_job_says_what_it_needs(jobs):
    for job in jobs:
        if job.runs:
            assert job.memory_mb, job.rule
            assert job.limit_s, job.rule


def test_the_partitions_of_the_example_are_read():
    from snakemake_executor_plugin_slurm.partitions import read_partition_file

    partitions = read_partition_file(ROOT / "profiles/slurm/partitions.yaml")
    assert [one.name for one in partitions] == ["cpu", "gpu"]
