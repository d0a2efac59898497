"""With conda every rule has its own environment, and in it all that its script imports; the library
installs without the workflow."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small_models import SMALL

from reproduction.running import code
from statecut.data.tokenizer import train_tokenizer
from statecut.models import create, load, save

ROOT = Path(__file__).parents[1]
PINS = runpy.run_path(str(ROOT / "envs" / "pins.py"))
# Modules that a rule names in its parameters, as their imports depend on the configuration.
NAMED = {"score": [f"selection.{path.stem}" for path in (code.SOURCE / "selection").glob("*.py")]}


def rules():
    """Script, environment and whether a GPU is asked for, by rule."""
    text = "".join(path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk")))
    parts = re.split(r"^ *rule (\w+):", text, flags=re.M)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        if "script:" in body:
            script, environment = (
                re.search(rf"{key}:\s+\"../../(.+)\"", body)[1] for key in ("script", "conda")
            )
            yield pytest.param(name, script, environment, "gpu=" in body, id=name)


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def imports(file):
    """Names that a file imports as it is loaded, and those that it imports inside functions."""
    found = {False: set(), True: set()}

    def look(node, inside):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found[inside].update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found[inside].update([node.module, *names])
        for child in ast.iter_child_nodes(node):
            look(child, inside or isinstance(node, ast.FunctionDef))

    look(code._parse(file), False)
    return found[False], found[True]


def place(module):
    return code._file(module, code.SOURCE)


def module(file):
    return ".".join(file.relative_to(code.SOURCE).with_suffix("").parts).removesuffix(".__init__")


def ours(names):
    """The files of Statecut's own modules among them."""
    found = (
        place(name.removeprefix("statecut.")) for name in names if name.startswith("statecut.")
    )
    return {file for file in found if file}


def imported(script, on_gpu, named):
    """Names of other packages, each with the file of ours that imports it.

    What stands around the work of all rules (code.APART) counts with what it imports inside
    functions only where the work itself turns to it; the job does for rules on a GPU.
    """
    work = [name for name in code.code_of(script, *named).modules if "/" not in name]
    files = [script, *map(place, work)]
    around = {file for file in code.SOURCE.rglob("*.py") if code._apart(module(file))}
    called = {other for file in files for names in imports(file) for other in ours(names)}
    on_gpus = {place(f"running.{name}") for name in ("job", "gpus", "provenance")}
    called = called | on_gpus if on_gpu else called - on_gpus
    found, seen, waiting = {}, set(), [script, *files]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        loaded, inside = imports(file)
        names = loaded if file in around - called else loaded | inside
        for other in ours(names):
            waiting += [other, *map(place, code._parents(module(other)))]
        found |= {name.split(".")[0]: file.name for name in names}
    return {name: by for name, by in found.items() if name != "statecut"}


providers = cache(metadata.packages_distributions)


@cache
def required(distribution):
    """What comes with a distribution: all that it requires, and what that requires."""
    found, waiting = set(), [normal(distribution)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(normal(requirement.name))
    return found


@pytest.mark.parametrize(("rule", "script", "environment", "on_gpu"), rules())
def test_the_environment_of_a_rule_has_what_its_script_imports(rule, script, environment, on_gpu):
    listed = PINS["ENVIRONMENTS"][environment][1]
    there = set().union(*map(required, listed))
    missing = {
        name: by
        for name, by in imported(ROOT / script, on_gpu, NAMED.get(rule, ())).items()
        if name not in sys.stdlib_module_names
        and not there & {normal(provider) for provider in providers().get(name, ())}
    }
    assert missing == {}, f"{environment} lacks these; envs/pins.py lists what it has"


def test_pretraining_has_flame_and_nothing_else_does():
    environments = {rule.id: rule.values[2] for rule in rules()}
    assert [name for name, env in environments.items() if env == "envs/pretrain.yaml"] == [
        "pretrain"
    ]
    assert (ROOT / "envs" / "pretrain.post-deploy.sh").is_file()


LIBRARY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def test_what_pruning_imports_is_required_by_the_library():
    """Wherever the import stands, in every module of ours that pruning may turn to."""
    names, files = {}, {place("prune")}
    waiting = [*files]
    while waiting:
        file = waiting.pop()
        imported_names = set().union(*imports(file))
        names |= {name.split(".")[0]: file.name for name in imported_names}
        others = ours(imported_names) - files
        files |= others
        waiting += others
    installed = set().union(*map(required, LIBRARY))
    outside = {
        name: file
        for name, file in names.items()
        if name not in {*sys.stdlib_module_names, "statecut"}
        and not installed & {normal(provider) for provider in providers().get(name, ())}
    }
    assert outside == {}
    assert not installed & {"snakemake", "lm-eval", "peft", "pandas", "matplotlib", "datasets"}


@pytest.fixture(scope="module")
def library_alone(tmp_path_factory):
    """A folder for sys.path with the library's requirements, what these require, and no more."""
    folder = tmp_path_factory.mktemp("site")
    packages = {"statecut": code.SOURCE}
    for name in set().union(*map(required, LIBRARY)):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
        packages |= {top: distribution.locate_file(top) for top in tops}
    for top, path in packages.items():
        (folder / top).symlink_to(path)
    return folder


def test_the_library_prunes_a_model_without_the_workflow(library_alone, tmp_path):
    train_tokenizer(["the quick brown fox"] * 9, tmp_path / "tokenizer", vocabulary_size=270)
    model = create({**SMALL["delta_net"], "vocab_size": 270}, seed=1)
    save(model, tmp_path / "model", tokenizer=tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text(" ".join(f"fox {number} jumps" for number in range(900)))

    def statecut(*arguments):
        start = (
            f"import sys; sys.path.append({str(library_alone)!r}); from statecut.cli import main;"
        )
        return subprocess.run(
            [sys.executable, "-ISc", f"{start} sys.exit(main())", *map(str, arguments)],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    pruned = statecut("prune", "model", "out", "--ratio", "0.5", "--text", "text.txt",
                    "--sequences", "4", "--length", "32", "--rows", "50", "--refit")  # fmt: skip
    assert pruned.returncode == 0, pruned.stderr
    assert "key channels per head" in pruned.stdout
    assert load(tmp_path / "out").model.layers[0].attn.head_k_dim == 8
    inspected = statecut("inspect", "out")
    assert "d_k 8, d_v 16" in inspected.stdout, inspected.stderr
    recovered = statecut("recover", "out", "model", "recovered")
    assert recovered.returncode == 2
    assert "peft is not installed, and this needs the packages of the work" in recovered.stderr
    refused = statecut("check", ROOT / "config" / "demo.yaml", "--profile", ROOT / "profiles/slurm")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("statecut: snakemake is not installed")
    assert "Traceback" not in refused.stderr
