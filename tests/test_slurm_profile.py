"""The profile for Slurm, on a machine with or without it."""

import re
from itertools import groupby
from pathlib import Path

import pytest
import yaml

from reproduction import slurm_check
from reproduction.dag import build_dag, parse_arguments

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/workflow/slurm.md").read_text()
PROFILE = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())


@pytest.fixture(scope="module")
def jobs():
    """Of each rule that runs, its jobs; what is left to run does not matter, all are there."""
    with pytest.MonkeyPatch.context() as here:
        here.chdir(ROOT)
        with build_dag(parse_arguments("profiles/slurm")) as built:
            jobs = sorted(built.dag.jobs, key=lambda job: job.rule.name)
    rules = groupby((job for job in jobs if not job.rule.norun), key=lambda job: job.rule.name)
    return {rule: [*members] for rule, members in rules}


def gpus(job):
    return job.resources.get("gpu", 0)


def test_every_rule_with_gpus_has_memory_time_and_a_kind_of_gpu(jobs):
    asked = PROFILE["set-resources"]
    with_gpus = {rule for rule, (job, *_) in jobs.items() if gpus(job)}
    with_gpus.add("refit")  # which the paper does not have
    assert with_gpus == {rule for rule, one in asked.items() if "gpu_model" in one}
    for one in asked.values():
        assert one["mem_mb"].endswith("* attempt")


def test_only_what_goes_on_in_the_queue_has_the_same_time_at_each_attempt():
    constant = {
        rule for rule, one in PROFILE["set-resources"].items() if isinstance(one["runtime"], int)
    }
    assert constant == {"pretrain", "recover"}


def test_the_filled_in_profile_of_the_documentation_fits_its_cluster(tmp_path, monkeypatch):
    """Its lines in place of those of the profile: all jobs of the paper can run there."""
    text = (ROOT / "profiles/slurm/config.yaml").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)
    for line in example.splitlines():
        name = line.split(":")[0].strip()
        text, count = re.subn(rf"^  (# )?{name}:.*$", line, text, flags=re.M)
        assert count == 1, line
    (tmp_path / "config.yaml").write_text(text)
    kinds = ("partitions", "nodes")
    printed = [(ROOT / f"tests/slurm/scontrol_{kind}.txt").read_text() for kind in kinds]
    monkeypatch.setattr(slurm_check, "read_cluster", lambda: slurm_check.parse_cluster(*printed))
    monkeypatch.setattr(slurm_check, "refusals", lambda command: [])
    monkeypatch.chdir(ROOT)
    paper = ROOT / "config/paper.yaml"
    assert slurm_check.unmet_requests(str(tmp_path), paper) == (16, [])
    # As the profile comes, they cannot; the page shows two of the reasons.
    _, unmet = slurm_check.unmet_requests("profiles/slurm", paper)
    shown = re.findall("    (profiles/slurm: .*)", GUIDE)
    assert len(shown) == 2
    assert {*shown} <= {*unmet}
