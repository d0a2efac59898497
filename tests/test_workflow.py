"""The workflow as Snakemake sees it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def snakemake(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--quiet", "host", *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("run", ["demo", "lab", "paper"])
def test_a_dry_run_plans_every_configuration(run):
    code, said = snakemake("--configfile", f"config/{run}.yaml", "--forceall")
    assert code == 0, said
    assert f"results/{run}/tokens/" in said


def test_without_a_configuration_it_is_the_demo():
    code, said = snakemake("--forceall")
    assert code == 0, said
    assert "results/demo/tokens/" in said


def test_a_configuration_replaces_the_demo_and_never_joins_it():
    _, said = snakemake("--configfile", "config/paper.yaml", "--forceall")
    assert "demo" not in said
    assert "documentation" not in said


def test_a_mistake_in_a_configuration_ends_the_dry_run(tmp_path):
    text = (ROOT / "config" / "demo.yaml").read_text()
    bad = tmp_path / "bad.yaml"
    bad.write_text(text.replace("seeds: [0]", "seeds: [0]\nseed: 1"))
    code, said = snakemake("--configfile", str(bad))
    assert code != 0
    assert "seed: unknown key; did you mean 'seeds'?" in said
