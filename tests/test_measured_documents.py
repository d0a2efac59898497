"""The documents show what the scripts in benchmarks/ print of the data in the repository."""

from pathlib import Path

import lab
import published_states
import pytest
import recall
import repeated
import serving
import serving_speed
import speed
import state_precision
from rows import read_rows

from statecut.files import read_json

ROOT = Path(__file__).parents[1]
DATA = ROOT / "benchmarks" / "h200"
PAGE = {"claims": "claims.md", "readme": "../../README.md"}  # others: lab.md


def page(name):
    return (ROOT / "docs" / "results" / name).read_text()


@pytest.mark.parametrize("table", lab.TABLES)
def test_the_lab(table):
    assert f"\n\n{lab.TABLES[table]()}\n\n" in page(PAGE.get(table, "lab.md"))


def test_bits_and_recall():
    bits = state_precision.table(read_rows(DATA / "state_precision.jsonl"))
    trainings = [read_rows(DATA / name) for name in ("recall.jsonl", "recall_eps.jsonl")]
    words = repeated.table(read_rows(DATA.parent / "cpu" / "repeated.jsonl"))
    assert f"\n\n{bits}\n\n" in page("lab.md")
    assert f"\n\n{words}\n\n" in page("lab.md")
    assert f"\n\n{recall.table(trainings)}\n\n" in page("lab.md")


def test_speed():
    shown = speed.tables(read_json(DATA / "speed.json"))
    assert [table for table in shown if f"\n\n{table}\n\n" not in page("speed.md")] == []


def test_serving():
    ran = read_json(DATA / "serving.json")
    shown = [*serving.tables(ran), *serving_speed.tables(read_json(DATA / "serving_speed.json"))]
    assert [table for table in shown if f"\n\n{table}\n\n" not in page("serving.md")] == []


def test_the_states_of_published_models():
    shown = "\n".join(published_states.table())
    assert any(shown in path.read_text() for path in (ROOT / "docs").rglob("*.md"))


def test_the_figures_are_drawn_from_the_data(tmp_path):
    lab.draw(tmp_path / "lab.svg")
    serving_speed.draw(read_json(DATA / "serving_speed.json"), tmp_path / "serving.svg")
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == page(drawn.name)
