"""The digest of the code behind a script."""

import ast
import re
from pathlib import Path

import pytest

from reproduction.running.code import (
    VERSIONS,
    KnownCode,
    _read_once,
    code_of,
    decide,
    digests_now,
    undecided,
)
from statecut.files import read_json, write_json

METHODS = ("statecut.first", "statecut.second")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def library(tmp_path):
    """A small library: two methods behind one door, and a package with a data file."""
    files = {
        "__init__.py": "",
        "door.py": "from importlib import import_module\nfrom statecut.common import one\n",
        "common.py": '"""Said."""\n\none = 1\n\n\ndef two():\n    return one + 1\n',
        "first.py": "from statecut import common\n\ny = common.two\n",
        "second.py": "def late():\n    from statecut.common import one\n    return one\n",
        "../reproduction/config.py": "x = 1\n",
        "noted.py": "@note\ndef method():\n    pass\n\n\ntable[1] = method\n",
        "package/__init__.py": "from reproduction.config import x\n"
        "from statecut.package.inner import z\n",
        "package/inner.py": "from statecut import second\n\nz = second.late()\n",
        "package/tasks/task.yaml": "version: 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "statecut" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "statecut"


def script(library: Path, text: str) -> Path:
    path = library.parent / "script.py"
    path.write_text(text)
    return path


def change(library: Path, name: str, text: str) -> None:
    (library / name).write_text((library / name).read_text() + text)


def test_it_holds_what_is_imported_anywhere_and_what_that_imports(library):
    path = script(library, "with job():\n    from statecut.package import z\n    z()\n")
    assert code_of(path, source=library.parent).modules == (
        "statecut.common", "statecut.package", "statecut.package.inner",
        "statecut.package/tasks/task.yaml", "statecut.second",
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "if x:\n    from statecut.common import one\n",
        "try:\n    import statecut.common\nexcept ImportError:\n    pass\n",
        "def f():\n    import statecut.common\n    statecut.common.two()\n",
        "from statecut.common import two\n\ntwo = wrap(two)\n",
        "from statecut import common as c\n\n_ = register(c)\n",
        "class A:\n    from statecut import common\n",
        "from statecut import hidden\n\nhidden.common.two()\n",
    ],
)
def test_however_a_module_is_imported_all_of_it_counts(library, text):
    (library / "hidden").mkdir()
    (library / "hidden/__init__.py").write_text("from statecut import common\n")
    path = script(library, text)
    before = code_of(path, source=library.parent)
    assert "statecut.common" in before.modules
    change(library, "common.py", "\n\nclass B(A):  # which may note itself somewhere\n    pass\n")
    assert code_of(path, source=library.parent).digest != before.digest


@pytest.mark.parametrize(
    "text",
    ["from statecut.common import *\n", "from . import common\n", "from .common import one\n"],
)
@pytest.mark.parametrize("place", ["script.py", "statecut/first.py"])
def test_imports_that_do_not_say_what_of_are_refused_with_their_line(library, text, place):
    path = script(library, "from statecut import first\n")
    (library.parent / place).write_text(f"x = 1\n\n\ndef f():\n    {text}" if "." in text[:7]
                                        else f"x = 1\n{text}")  # fmt: skip
    line = 5 if "." in text[:7] else 2
    with pytest.raises(ValueError, match=rf"{place}, line {line}: {re.escape(text.strip())}: "):
        code_of(path, source=library.parent)


def test_a_module_that_is_named_rather_than_imported_can_be_given(library):
    path = script(library, "from statecut import door\n")
    first = code_of(path, "statecut.first", source=library.parent)
    second = code_of(path, "statecut.second", source=library.parent)
    change(library, "first.py", "y = 2\n")
    assert code_of(path, "statecut.first", source=library.parent) != first
    assert code_of(path, "statecut.second", source=library.parent) == second


@pytest.mark.parametrize("name", ["common.py", "second.py", "package/inner.py"])
def test_a_change_of_what_it_does_is_another_digest(library, name):
    path = script(library, "from statecut.package import z\nz()\n")
    before = code_of(path, source=library.parent).digest
    change(library, "first.py", "y = 2\n")
    assert code_of(path, source=library.parent).digest == before
    change(library, name, "y = 2\n")
    assert code_of(path, source=library.parent).digest != before


def test_a_data_file_counts_like_code(library):
    path = script(library, "import statecut.package\n")
    before = code_of(path, source=library.parent).digest
    change(library, "package/tasks/task.yaml", "shots: 1\n")
    assert code_of(path, source=library.parent).digest != before


def test_what_another_python_knows_of_and_is_not_used_does_not_count(library, monkeypatch):
    path = script(library, "from statecut.common import one\none()\n")
    (library / "common.py").write_text("def one():\n    return 1\n")
    before = code_of(path, source=library.parent)

    def with_more_fields(file):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            node._fields += ("of_another_python",)
            node.of_another_python = []
        return tree

    monkeypatch.setattr("reproduction.running.code._parse", with_more_fields)
    _read_once.cache_clear()
    assert code_of(path, source=library.parent) == before


def test_the_script_itself_counts(library):
    before = code_of(script(library, "print(1)\n"), source=library.parent)
    assert code_of(script(library, "print(2)\n"), source=library.parent).digest != before.digest


def test_what_stands_in_for_kernels_does_not_count_on_a_gpu():
    scripts = ROOT / "scripts"
    for stage in ("calibrate", "evaluate", "analyze", "measure", "pretrain", "recover"):
        assert (
            "statecut.models.plain_kernels"
            in code_of(scripts / f"{stage}.py", device="cpu").modules
        )
        assert (
            "statecut.models.plain_kernels"
            not in code_of(scripts / f"{stage}.py", device="cuda").modules
        )


def test_but_the_preflight_compares_kernels_of_a_gpu_with_it(tmp_path):
    scripts = ROOT / "scripts"
    assert (
        "statecut.models.plain_kernels"
        in code_of(scripts / "preflight_shape.py", device="cuda").modules
    )
    # Wherever its code is asked for: beside what it made, in the report, by its authors.
    known = KnownCode.of(scripts / "preflight_shape.py", device="cuda")
    now = known.with_modules()
    assert now.digest == digests_now(scripts, device="cuda")["preflight_shape"]
    assert "statecut.models.plain_kernels" in now.modules


def test_a_method_decides_by_its_own_code_and_the_rest_of_its_stage_by_a_version(library):
    path = script(library, "from statecut import common\n")
    version = {"version": 1, "code": "some"}
    write_json(path.parent / VERSIONS, {"script": {"cpu": version, "cuda": version}})

    def known():
        both = (KnownCode.of(path, name, device="cpu", source=library.parent) for name in METHODS)
        return [(code.version, code.own) for code in both]

    first, second = known()
    change(library, "common.py", "y = 2\n")
    assert known() == [first, second]
    change(library, "first.py", "y = 2\n")
    assert known()[0] != first
    assert known()[1] == second


def test_of_every_version_it_is_decided_whether_results_changed():
    left = [f"{stage} on {device}" for stage, device, _ in undecided(ROOT / "scripts")]
    assert not left, (
        f"the code of {', '.join(left)} changed. If their results are the same, "
        "`python -m reproduction.running.code same`; if not, the same with `raise`"
    )


def test_what_has_a_version_is_known_by_it_and_not_by_its_code(tmp_path):
    path = script(tmp_path / "statecut", "from statecut.files import digest\n")
    version = {"version": 3, "code": "the code that it was given for"}
    write_json(tmp_path / VERSIONS, {"script": {"cpu": version, "cuda": version}})
    known = KnownCode.of(path, device="cuda")
    assert known.version == 3
    path.write_text("from statecut import files\n")
    assert known.is_current()
    assert decide(tmp_path, raised=False) == [
        "script on cpu: version 3",
        "script on cuda: version 3",
    ]
    assert known.is_current()
    assert undecided(tmp_path) == []
    path.write_text("from statecut import errors\n")
    decide(tmp_path, raised=True)
    assert read_json(tmp_path / VERSIONS)["script"]["cuda"]["version"] == 4
    assert not known.is_current()


def test_words_do_not_count(library):
    path = script(library, "from statecut.common import one\none\n")
    before = code_of(path, source=library.parent)
    text = (library / "common.py").read_text()
    (library / "common.py").write_text(
        text.replace("Said", "Other").replace(" = ", "  =  ") + "# Why.\n"
    )
    path.write_text('"""What it does."""\n\n# Why.\nfrom statecut.common import one\n\none\n')
    assert code_of(path, source=library.parent) == before


def test_the_configurations_own_code_does_not_count(library):
    path = script(library, "from statecut.package import x\n")
    before = code_of(path, source=library.parent)
    change(library, "../reproduction/config.py", "y = 2\n")
    assert code_of(path, source=library.parent) == before


def test_a_module_that_is_not_there_is_an_error(library):
    with pytest.raises(ModuleNotFoundError, match=r"statecut\.third: there is no such module"):
        code_of(script(library, ""), "statecut.third", source=library.parent)


def test_a_selection_depends_on_its_own_method_alone():
    from statecut.pruning.methods import METHODS

    for method in METHODS.values():
        found = code_of(ROOT / "scripts" / "score.py", method.module).modules
        own = {module for module in found if module.startswith("statecut.pruning.methods.")}
        assert own == {method.module}


def test_how_a_method_is_shown_is_no_part_of_what_it_computes(library):
    text = "METHODS = (Method('m', label='M', colour='#111111', needs=('text',)),)\n"
    path = script(library, "from statecut import method\n")

    def of(text):
        (library / "method.py").write_text(text)
        _read_once.cache_clear()
        return code_of(path, source=library.parent).digest

    assert of(text.replace("'M'", "'N'").replace("#111111", "#222222")) == of(text)
    assert of(text.replace("('text',)", "()")) != of(text)


def test_what_was_made_by_code_that_is_gone_was_made_by_other_code():
    script = str(ROOT / "scripts" / "score.py")
    assert not KnownCode(script, ["statecut.gone"], digest="").is_current()
    assert not KnownCode("scripts/gone.py", [], digest="").is_current()


@pytest.mark.parametrize(
    ("script", "apart"),
    [
        ("pretrain", ("methods", "slicing", "suites", "reporting", "calibration")),
        ("evaluate", ("methods", "slicing", "recovery", "reporting", "calibration", "plan")),
        ("measure", ("methods", "slicing", "recovery", "reporting", "suites", "plan")),
        ("score", ("recovery", "reporting", "suites", "benchmarking", "plan")),
        ("analyze", ("slicing", "recovery", "reporting", "suites", "plan")),
        ("calibrate", ("slicing", "recovery", "reporting", "suites")),
        ("table", ("architectures", "recovery", "suites", "pruning")),
    ],
)
def test_no_stage_depends_on_the_code_of_a_later_one(script, apart):
    found = code_of(ROOT / "scripts" / f"{script}.py").modules
    assert not [name for name in found if set(name.split(".")) & set(apart)]
