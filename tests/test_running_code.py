"""The digest of the code behind a script."""

import ast
import re
from pathlib import Path

import pytest

from keycut.artefact import read_json, write_json
from keycut.running.code import (
    VERSIONS,
    KnownCode,
    _read_once,
    code_of,
    decide,
    digests_now,
    undecided,
)

METHODS = ("keycut.first", "keycut.second")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def library(tmp_path):
    """A small library: two methods behind one door, and a package with a data file."""
    files = {
        "__init__.py": "",
        "door.py": "from importlib import import_module\nfrom keycut.common import one\n",
        "common.py": '"""Said."""\n\none = 1\n\n\ndef two():\n    return one + 1\n',
        "first.py": "from keycut import common\n\ny = common.two\n",
        "second.py": "def late():\n    from keycut.common import one\n    return one\n",
        "config.py": "x = 1\n",
        "noted.py": "@note\ndef method():\n    pass\n\n\ntable[1] = method\n",
        "package/__init__.py": "from keycut.config import x\nfrom keycut.package.inner import z\n",
        "package/inner.py": "from keycut import second\n\nz = second.late()\n",
        "package/tasks/task.yaml": "version: 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "keycut" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "keycut"


def script(library: Path, text: str) -> Path:
    path = library.parent / "script.py"
    path.write_text(text)
    return path


def change(library: Path, name: str, text: str) -> None:
    (library / name).write_text((library / name).read_text() + text)


def test_it_holds_what_is_imported_anywhere_and_what_that_imports(library):
    path = script(library, "with job():\n    from keycut.package import z\n    z()\n")
    assert code_of(path, source=library).modules == (
        "common", "package", "package.inner", "package/tasks/task.yaml", "second",
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "if x:\n    from keycut.common import one\n",
        "try:\n    import keycut.common\nexcept ImportError:\n    pass\n",
        "def f():\n    import keycut.common\n    keycut.common.two()\n",
        "from keycut.common import two\n\ntwo = wrap(two)\n",
        "from keycut import common as c\n\n_ = register(c)\n",
        "class A:\n    from keycut import common\n",
        "from keycut import hidden\n\nhidden.common.two()\n",
    ],
)
def test_however_a_module_is_imported_all_of_it_counts(library, text):
    (library / "hidden").mkdir()
    (library / "hidden/__init__.py").write_text("from keycut import common\n")
    path = script(library, text)
    before = code_of(path, source=library)
    assert "common" in before.modules
    change(library, "common.py", "\n\nclass B(A):  # which may note itself somewhere\n    pass\n")
    assert code_of(path, source=library).digest != before.digest


@pytest.mark.parametrize(
    "text", ["from keycut.common import *\n", "from . import common\n", "from .common import one\n"]
)
@pytest.mark.parametrize("place", ["script.py", "keycut/first.py"])
def test_imports_that_do_not_say_what_of_are_refused_with_their_line(library, text, place):
    path = script(library, "from keycut import first\n")
    (library.parent / place).write_text(f"x = 1\n\n\ndef f():\n    {text}" if "." in text[:7]
                                        else f"x = 1\n{text}")  # fmt: skip
    line = 5 if "." in text[:7] else 2
    with pytest.raises(ValueError, match=rf"{place}, line {line}: {re.escape(text.strip())}: "):
        code_of(path, source=library)


def test_a_module_that_is_named_rather_than_imported_can_be_given(library):
    path = script(library, "from keycut import door\n")
    first = code_of(path, "keycut.first", source=library)
    second = code_of(path, "keycut.second", source=library)
    change(library, "first.py", "y = 2\n")
    assert code_of(path, "keycut.first", source=library) != first
    assert code_of(path, "keycut.second", source=library) == second


@pytest.mark.parametrize("name", ["common.py", "second.py", "package/inner.py"])
def test_a_change_of_what_it_does_is_another_digest(library, name):
    path = script(library, "from keycut.package import z\nz()\n")
    before = code_of(path, source=library).digest
    change(library, "first.py", "y = 2\n")
    assert code_of(path, source=library).digest == before
    change(library, name, "y = 2\n")
    assert code_of(path, source=library).digest != before


def test_a_data_file_counts_like_code(library):
    path = script(library, "import keycut.package\n")
    before = code_of(path, source=library).digest
    change(library, "package/tasks/task.yaml", "shots: 1\n")
    assert code_of(path, source=library).digest != before


def test_what_another_python_knows_of_and_is_not_used_does_not_count(library, monkeypatch):
    path = script(library, "from keycut.common import one\none()\n")
    (library / "common.py").write_text("def one():\n    return 1\n")
    before = code_of(path, source=library)

    def with_more_fields(file):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            node._fields += ("of_another_python",)
            node.of_another_python = []
        return tree

    monkeypatch.setattr("keycut.running.code._parse", with_more_fields)
    _read_once.cache_clear()
    assert code_of(path, source=library) == before


def test_the_script_itself_counts(library):
    before = code_of(script(library, "print(1)\n"), source=library)
    assert code_of(script(library, "print(2)\n"), source=library).digest != before.digest


def test_what_stands_in_for_kernels_does_not_count_on_a_gpu():
    scripts = ROOT / "scripts"
    for stage in ("calibrate", "evaluate", "analyze", "measure", "pretrain", "recover"):
        assert "models.plain_kernels" in code_of(scripts / f"{stage}.py", device="cpu").modules
        assert "models.plain_kernels" not in code_of(scripts / f"{stage}.py", device="cuda").modules


def test_but_the_preflight_compares_kernels_of_a_gpu_with_it(tmp_path):
    scripts = ROOT / "scripts"
    assert "models.plain_kernels" in code_of(scripts / "preflight_shape.py", device="cuda").modules
    # Wherever its code is asked for: beside what it made, in the report, by its authors.
    known = KnownCode.of(scripts / "preflight_shape.py", device="cuda")
    now = known.with_modules()
    assert now.digest == digests_now(scripts, device="cuda")["preflight_shape"]
    assert "models.plain_kernels" in now.modules


def test_a_method_decides_by_its_own_code_and_the_rest_of_its_stage_by_a_version(library):
    path = script(library, "from keycut import common\n")
    version = {"version": 1, "code": "some"}
    write_json(path.parent / VERSIONS, {"script": {"cpu": version, "cuda": version}})

    def known():
        both = (KnownCode.of(path, name, device="cpu", source=library) for name in METHODS)
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
        "`python -m keycut.running.code same`; if not, `python -m keycut.running.code raise`"
    )


def test_what_has_a_version_is_known_by_it_and_not_by_its_code(tmp_path):
    path = script(tmp_path / "keycut", "from keycut.artefact import digest\n")
    version = {"version": 3, "code": "the code that it was given for"}
    write_json(tmp_path / VERSIONS, {"script": {"cpu": version, "cuda": version}})
    known = KnownCode.of(path, device="cuda")
    assert known.version == 3
    path.write_text("from keycut import artefact\n")
    assert known.is_current()
    assert decide(tmp_path, raised=False) == [
        "script on cpu: version 3",
        "script on cuda: version 3",
    ]
    assert known.is_current()
    assert undecided(tmp_path) == []
    path.write_text("from keycut import errors\n")
    decide(tmp_path, raised=True)
    assert read_json(tmp_path / VERSIONS)["script"]["cuda"]["version"] == 4
    assert not known.is_current()


def test_words_do_not_count(library):
    path = script(library, "from keycut.common import one\none\n")
    before = code_of(path, source=library)
    text = (library / "common.py").read_text()
    (library / "common.py").write_text(
        text.replace("Said", "Other").replace(" = ", "  =  ") + "# Why.\n"
    )
    path.write_text('"""What it does."""\n\n# Why.\nfrom keycut.common import one\n\none\n')
    assert code_of(path, source=library) == before


def test_the_configurations_own_code_does_not_count(library):
    path = script(library, "from keycut.package import x\n")
    before = code_of(path, source=library)
    change(library, "config.py", "y = 2\n")
    assert code_of(path, source=library) == before


def test_a_module_that_is_not_there_is_an_error(library):
    with pytest.raises(ModuleNotFoundError, match=r"keycut\.third: there is no such module"):
        code_of(script(library, ""), "keycut.third", source=library)


def test_a_selection_depends_on_its_own_method_alone():
    from keycut.selection.methods import METHODS

    for method in METHODS.values():
        found = code_of(ROOT / "scripts" / "score.py", method.module).modules
        own = {f"keycut.{module}" for module in found if module.startswith("selection.methods.")}
        assert own == {method.module}


def test_how_a_method_is_shown_is_no_part_of_what_it_computes(library):
    text = "METHODS = (Method('m', label='M', colour='#111111', needs=('text',)),)\n"
    path = script(library, "from keycut import method\n")

    def of(text):
        (library / "method.py").write_text(text)
        _read_once.cache_clear()
        return code_of(path, source=library).digest

    assert of(text.replace("'M'", "'N'").replace("#111111", "#222222")) == of(text)
    assert of(text.replace("('text',)", "()")) != of(text)


def test_what_was_made_by_code_that_is_gone_was_made_by_other_code():
    script = str(ROOT / "scripts" / "score.py")
    assert not KnownCode(script, ["keycut.gone"], digest="").is_current()
    assert not KnownCode("scripts/gone.py", [], digest="").is_current()


@pytest.mark.parametrize(
    ("script", "apart"),
    [
        ("pretrain", ("selection", "slicing", "evaluation", "reporting", "calibration")),
        ("evaluate", ("selection", "slicing", "training", "reporting", "calibration", "plan")),
        ("measure", ("selection", "slicing", "training", "reporting", "evaluation", "plan")),
        ("score", ("training", "reporting", "evaluation", "benchmarking", "plan")),
        ("analyze", ("slicing", "training", "reporting", "evaluation", "plan")),
        ("calibrate", ("slicing", "training", "reporting", "evaluation")),
        ("table", ("models", "training", "evaluation", "selection")),
    ],
)
def test_no_stage_depends_on_the_code_of_a_later_one(script, apart):
    found = code_of(ROOT / "scripts" / f"{script}.py").modules
    assert not [name for name in found if name.split(".")[0] in apart]
