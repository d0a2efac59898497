"""Versions are pinned in envs/constraints.txt alone; the wheel holds the library, which needs no
more than it requires."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small_models import workplace

from statecut import __version__
from statecut.models.checkpoint import load

ROOT = Path(__file__).parents[1]
PINS = runpy.run_path(str(ROOT / "envs" / "pins.py"))


def normal(requirement):
    """The name of a distribution, without extras, in one spelling."""
    return re.sub(r"[-_.]+", "-", requirement.partition("[")[0]).lower()


def project(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


LIBRARY = project(".")["dependencies"]
REPRODUCTION = project("src/reproduction")["dependencies"]
EXTRAS = [name for group in project(".")["optional-dependencies"].values() for name in group]


@pytest.mark.parametrize("file", sorted(PINS["ENVIRONMENTS"]))
def test_environment_files_say_what_the_constraints_say(file):
    written = PINS["environment"](*PINS["ENVIRONMENTS"][file])
    assert (ROOT / file).read_text() == written, "run `make pins`"


def test_pretraining_installs_flame_by_its_commit():
    script = (ROOT / "envs" / "pretrain.post-deploy.sh").read_text()
    assert script == PINS["flame_script"](), "run `make pins`"
    assert len(re.findall(r"git\+\S+@[0-9a-f]{40}\b", script)) == 2


def test_every_requirement_is_pinned_and_in_the_conda_environment():
    pinned = {normal(name) for name in PINS["pins"]()}
    assert {normal(name) for name in [*LIBRARY, *REPRODUCTION, *EXTRAS]} - {"statecut"} <= pinned
    listed = {normal(name) for name in PINS["ENVIRONMENTS"]["environment.yml"][1]}
    assert {normal(name) for name in [*LIBRARY, *REPRODUCTION]} - {"statecut"} <= listed


def test_both_packages_and_the_changelog_have_the_same_version():
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__ == project("src/reproduction")["version"]


def required(distribution, found):
    """Adds a distribution, all that it requires, and what that requires."""
    if (name := normal(distribution)) not in found:
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def library_alone(tmp_path_factory):
    """A folder for sys.path with the library's wheel, what it requires, and no more."""
    folder = tmp_path_factory.mktemp("site")
    checkout = tmp_path_factory.mktemp("checkout")  # the build leaves folders behind
    shutil.copytree(ROOT / "src", checkout / "src")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, str(checkout), "-w", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        "statecut", wheel.name.split("-py3")[0] + ".dist-info",
    }  # fmt: skip
    assert (folder / "statecut" / "py.typed").is_file()
    found: set[str] = set()
    for requirement in LIBRARY:
        required(requirement, found)
    assert not found & {"snakemake", "lm-eval", "peft", "pandas", "matplotlib"}
    for name in found:
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
        for top in (top for top in tops if not (folder / top).exists()):
            (folder / top).symlink_to(distribution.locate_file(top))
    return folder


ALONE = """
import sys
sys.path.append(sys.argv[1])
from statecut.cli import main
text = ["--text", "text.jsonl", "--sequences", "4", "--length", "32"]
assert main(["prune", "delta_net", "out", "--ratio", "0.5", "--rows", "50", *text]) == 0
assert main(["inspect", "out"]) == 0
assert main(["evaluate", "out", *text]) == 0
assert main(["evaluate", "out", "--tasks", "wikitext"]) == 2
assert main(["recover", "out", "delta_net", "recovered", "--text", "text.jsonl"]) == 2
"""


def test_the_library_prunes_a_model_without_the_reproduction(library_alone, tmp_path):
    workplace(tmp_path, "delta_net")
    command = [sys.executable, "-ISc", ALONE, str(library_alone)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "out").model.layers[0].attn.head_k_dim == 8
    assert "2 of keys (d_k 8), 2 of values (d_v 16)" in done.stdout
    assert "perplexity  " in done.stdout
    assert "lm_eval is not installed" in done.stderr
    assert "statecut: peft is not installed" in done.stderr
