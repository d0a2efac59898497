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
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("config", "models", "results")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXTS = {path: path.read_text() for path in DOCUMENTS}


def names(path):
    return str(path.relative_to(ROOT))


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def links(document):
    return re.findall(r"\]\(([^)\s]+)\)", TEXTS[document])


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_links_lead_somewhere(document):
    for target in (link for link in links(document) if "://" not in link):
        path, _, section = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        if section:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
            assert section in map(anchor, headings), target


def test_every_page_is_linked_from_another():
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in TEXTS for link in links(page)
    }
    assert [names(path) for path in (ROOT / "docs").rglob("*.md") if path not in linked] == []


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "CHANGELOG.md"], ids=names)
def test_files_commands_and_options_exist(document):
    text = re.sub(r"\\\n\s*", " ", TEXTS[document])  # commands on several lines
    for path in re.findall(
        r"\b(?:benchmarks|docs|envs|profiles|scripts|src|tests)/[\w./-]*\w", text
    ):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {*re.findall(r"(?m)(?:^    |`)make ([a-z-]+)", text)} <= {*targets}
    for program in (statecut, reproduction):
        (commands,) = program.parser()._subparsers._group_actions
        called = program.__name__.partition(".")[0]
        for name, arguments in re.findall(rf"(?m)(?:^    |`){called} ([a-z]+)([^`#\n]*)", text):
            options = commands.choices[name]._option_string_actions
            assert {*re.findall(r"--[a-z-]+", arguments)} <= {*options}


def test_code_that_names_a_page_names_one_that_is_there():
    code = [path for folder in ("src", "workflow", "config", "profiles", "tests", "benchmarks")
            for ending in ("*.py", "*.smk", "*.yaml", "Snakefile")
            for path in (ROOT / folder).rglob(ending)]  # fmt: skip
    named = {page for path in code for page in re.findall(r"\bdocs/[\w/-]+\.\w+", path.read_text())}
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_the_page_on_architectures_has_all_that_an_adapter_says():
    page = (ROOT / "docs/reference/architectures.md").read_text()
    assert [f.name for f in fields(Architecture) if f"`{f.name}`" not in page] == []


def test_the_diagram_is_of_the_rules_as_they_are():
    dag = runpy.run_path(str(ROOT / "docs/dag.py"))
    assert dag["diagram"]() in dag["PAGE"].read_text(), "run `make dag`"
