"""The digest of the code behind a script."""

import ast
from pathlib import Path

import pytest

from keycut.artefact import read_json, write_json
from keycut.code import VERSIONS, _read_once, code_of, decide, known_code, same_code, undecided

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


def test_it_holds_what_is_used_anywhere_and_what_that_uses(library):
    path = script(library, "with job():\n    from keycut.package import z\n    z()\n")
    found = code_of(path, source=library)
    assert found.parts == ("common:one", "package.inner:z", "package/tasks/task.yaml",
                           "second:late")  # fmt: skip
    assert found.modules == ("common", "package.inner", "package/tasks/task.yaml", "second")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("from keycut.common import one\n", ()),  # imported, and not used
        ("from keycut.common import one\none\n", ("common:one",)),
        ("from keycut import common\ncommon.one\n", ("common:one",)),
        ("from keycut import common as c\nc.two()\n", ("common:one", "common:two")),
        ("from keycut import common\ngetattr(common, x)\n", ("common:one", "common:two")),
        ("from keycut import common\ncommon.__dict__\n", ("common:one", "common:two")),
        ("import keycut.common\n", ("common:one", "common:two")),
        ("from keycut.first import y\ny\n", ("common:one", "common:two", "first:y")),
        ("from keycut import noted\n", ("noted:0", "noted:1")),  # they run when it is loaded
    ],
)
def test_what_is_not_used_does_not_count(library, text, parts):
    assert code_of(script(library, text), source=library).parts == parts


def test_a_module_that_is_named_rather_than_imported_can_be_given(library):
    path = script(library, "from keycut import door\n")
    first = code_of(path, "keycut.first", source=library)
    second = code_of(path, "keycut.second", source=library)
    change(library, "first.py", "y = 2\n")
    assert code_of(path, "keycut.first", source=library) != first
    assert code_of(path, "keycut.second", source=library) == second


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("common.py", "one = 2\n"),
        ("second.py", "\n\ndef late():\n    return 2\n"),
        ("package/inner.py", "z = 2\n"),
        ("package/inner.py", "print()\n"),
    ],
)
def test_a_change_of_what_it_does_is_another_digest(library, name, text):
    path = script(library, "from keycut.package import z\nz()\n")
    before = code_of(path, source=library).digest
    change(library, name, "y = 2\n")
    assert code_of(path, source=library).digest == before
    change(library, name, text)
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

    monkeypatch.setattr("keycut.code._parsed", with_more_fields)
    _read_once.cache_clear()
    assert code_of(path, source=library) == before


def test_the_script_itself_counts(library):
    before = code_of(script(library, "print(1)\n"), source=library)
    assert code_of(script(library, "print(2)\n"), source=library).digest != before.digest


def test_what_stands_in_for_kernels_does_not_count_on_a_gpu():
    scripts = ROOT / "scripts"
    for stage in ("calibrate", "evaluate", "analyze", "measure", "pretrain", "recover"):
        assert "models.cpu" in code_of(scripts / f"{stage}.py", device="cpu").modules
        assert "models.cpu" not in code_of(scripts / f"{stage}.py", device="cuda").modules


def test_of_every_version_it_is_decided_whether_results_changed():
    left = [f"{stage} on {device}" for stage, device, _ in undecided(ROOT / "scripts")]
    assert not left, (
        f"the code of {', '.join(left)} changed. If their results are the same, "
        "`python -m keycut.code same`; if not, `python -m keycut.code raise`"
    )


def test_what_has_a_version_is_known_by_it_and_not_by_its_code(tmp_path):
    path = script(tmp_path / "keycut", "from keycut.artefact import digest\n")
    version = {"version": 3, "code": "the code that it was given for"}
    write_json(tmp_path / VERSIONS, {"script": {"cpu": version, "cuda": version}})
    known = known_code(path, device="cuda")
    assert known["version"] == 3
    path.write_text("from keycut import artefact\n")
    assert same_code(known)
    assert decide(tmp_path, raised=False) == [
        "script on cpu: version 3",
        "script on cuda: version 3",
    ]
    assert same_code(known)
    assert undecided(tmp_path) == []
    path.write_text("from keycut import errors\n")
    decide(tmp_path, raised=True)
    assert read_json(tmp_path / VERSIONS)["script"]["cuda"]["version"] == 4
    assert not same_code(known)


def test_words_do_not_count(library):
    path = script(library, "from keycut.common import one\none\n")
    before = code_of(path, source=library)
    (library / "common.py").write_text('"""Said otherwise."""\n\n# Why.\none   =   1\n')
    assert code_of(path, source=library) == before


def test_the_configurations_own_code_does_not_count(library):
    path = script(library, "from keycut.package import x\n")
    before = code_of(path, source=library)
    change(library, "config.py", "y = 2\n")
    assert code_of(path, source=library) == before


def test_a_module_that_is_not_there_is_an_error(library):
    with pytest.raises(ValueError, match=r"keycut\.third: there is no such module"):
        code_of(script(library, ""), "keycut.third", source=library)


def test_no_method_is_part_of_anothers_code():
    from keycut.selection import FILES, module

    scripts = ROOT / "scripts"
    for method in FILES:
        found = code_of(scripts / "score.py", module(method)).modules
        others = {f"selection.{file}" for file in FILES.values()} - {f"selection.{FILES[method]}"}
        assert not others & {*found}


@pytest.mark.parametrize(
    ("script", "apart"),
    [
        ("pretrain", ("selection", "slicing", "evaluation", "reporting", "calibration")),
        ("evaluate", ("selection", "slicing", "training", "reporting", "calibration")),
        ("calibrate", ("slicing", "training", "reporting", "evaluation")),
        ("table", ("models", "training", "evaluation", "selection")),
    ],
)
def test_no_stage_depends_on_the_code_of_a_later_one(script, apart):
    found = code_of(ROOT / "scripts" / f"{script}.py").modules
    assert not [name for name in found if name.split(".")[0] in apart]
