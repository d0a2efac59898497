"""Every version is pinned in envs/constraints.txt, and the other files say the same."""

import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

from reproduction.config.needs import FLAME
from statecut.serving.engines import ENGINES

ROOT = Path(__file__).parent.parent
PINS = runpy.run_path(str(ROOT / "envs" / "pins.py"))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(group):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] if group is None else project["optional-dependencies"][group]


@pytest.mark.parametrize("file", sorted(PINS["ENVIRONMENTS"]))
def test_environment_files_say_what_the_constraints_say(file):
    written = PINS["environment"](*PINS["ENVIRONMENTS"][file])
    assert (ROOT / file).read_text() == written, "run `make pins`"


def test_all_environment_files_are_written():
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "envs").glob("*.yaml")}
    assert files | {"environment.yml"} == set(PINS["ENVIRONMENTS"])
    script = (ROOT / "envs" / "pretrain.post-deploy.sh").read_text()
    assert script == PINS["flame_script"](), "run `make pins`"


def test_conda_installs_for_pretraining_what_make_flame_does(tmp_path):
    """Snakemake runs the script of an environment's name in that environment."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    said = subprocess.run(
        ["bash", str(ROOT / "envs" / "pretrain.post-deploy.sh")],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    make = re.search(r"pip (install .+) -r envs/flame.txt", (ROOT / "Makefile").read_text())[1]
    lines = (ROOT / "envs" / "flame.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert said == ["-m", "pip", *make.split(), *listed]
    assert {line.split()[0] for line in listed if "git+" in line} == {*FLAME}


@pytest.mark.parametrize("group", [None, "workflow", "dev"])
def test_every_requirement_is_pinned_once(group):
    pinned = {normal(name) for name in PINS["pins"]()}
    for requirement in requirements(group):
        name = re.fullmatch(r"([A-Za-z0-9-]+)(\[[a-z]+\])?", requirement)
        assert name, "versions stand in the constraints"
        assert normal(name[1]) in pinned


def test_conda_environments_have_every_requirement():
    listed = {normal(name) for name in PINS["ENVIRONMENTS"]["environment.yml"][1]}
    assert {normal(r) for r in [*requirements(None), *requirements("workflow")]} <= listed


def test_flame_is_pinned_by_commit():
    lines = (ROOT / "envs" / "flame.txt").read_text().splitlines()
    sources = [line for line in lines if "git+" in line]
    assert len(sources) == 2
    assert all(re.search(r"@[0-9a-f]{40}$", line) for line in sources)
    rest = [line for line in lines if line and not line.startswith("#") and "git+" not in line]
    assert all("==" in line for line in rest)


def test_llama_cpp_is_pinned_and_the_version_that_engines_name():
    lines = (ROOT / "envs" / "llama.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    source = ENGINES["llama.cpp"].source
    assert f"llama-cpp-python {pinned['llama-cpp-python']}," in source
    commit = re.search(r"llama\.cpp ([0-9a-f]{40})", "\n".join(lines))[1]
    assert f"llama.cpp {commit[:7]}:" in source
    assert not {normal(name) for name in pinned} & {normal(name) for name in PINS["pins"]()}
