"""README.md and docs/ say what is there."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from reproduction import cli as reproduction
from statecut import cli as statecut
from statecut.models.architectures.base import Architecture

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "config/README.md", "models/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, section = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        if section:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
            assert section in map(anchor, headings), target


def test_every_page_is_linked_from_another():
    linked = {
        (document.parent / target.partition("#")[0]).resolve()
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    }
    assert [path.name for path in DOCUMENTS[1:] if path not in linked] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_commands_and_options_exist(document):
    text = re.sub(r"\\\n\s*", " ", document.read_text())  # commands on several lines
    for path in re.findall(r"\b(?:benchmarks|envs|profiles|scripts|src|tests)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {*re.findall(r"(?m)(?:^    |`)make ([a-z-]+)", text)} <= {*targets}
    for program in (statecut, reproduction):
        (commands,) = program.parser()._subparsers._group_actions
        called = program.__name__.partition(".")[0]
        for name, arguments in re.findall(rf"(?m)(?:^    |`){called} ([a-z]+)([^`#\n]*)", text):
            options = commands.choices[name]._option_string_actions
            assert {*re.findall(r"--[a-z-]+", arguments)} <= {*options}


def test_the_page_on_architectures_has_all_that_an_adapter_says():
    page = (ROOT / "docs/architectures.md").read_text()
    assert [f.name for f in fields(Architecture) if f"`{f.name}`" not in page] == []


def test_the_diagram_is_of_the_rules_as_they_are():
    dag = runpy.run_path(str(ROOT / "docs" / "dag.py"))
    assert dag["diagram"]() in DOCUMENTS[0].read_text(), "run `make dag`"
