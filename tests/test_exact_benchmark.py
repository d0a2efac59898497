"""The benchmark of exact cuts: on a tiny model, and the document's tables from its rows."""

import json
import sys
from pathlib import Path

import pytest
from small_models import SMALL
from training_runs import packed

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import exact

from statecut.models import create, save

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path, monkeypatch):
    save(create(SMALL["gated"], seed=1), tmp_path / "model")
    packed(tmp_path / "text", 64, slices={"held_out": (0, 4), "calibration": (4, 64)})
    cells = ("--models", "model", "--text", "text", "--sequences", "12", "--methods", "l1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["exact.py", *cells, "--out", "rows.jsonl", *arguments])
        exact.main()
        return [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]

    return run


def test_ways_differ_by_eps_and_by_the_projection(run):
    rows = run("--splits", "8x12", "--ways", *exact.WAYS)
    eps = {row["way"]: row["eps"] for row in rows}
    assert eps == pytest.approx({"kept": 1e-6, "keys": 2e-6, "exact": 4e-6, "eps": 4e-6})
    sliced = {row["way"]: row["perplexity"]["sliced"]["held_out"] for row in rows}
    assert len(set(sliced.values())) == len(exact.WAYS)
    assert len(run("--splits", "8x12", "--ways", "exact", "--factors", "1", "2")) == len(rows) + 1


def test_the_output_norm_is_not_among_the_other_norms(run, monkeypatch):
    def seen(model, ids):
        return model.model.norm.eps / model.model.layers[0].attn.o_norm.eps

    monkeypatch.setattr(exact, "in_memory", seen)
    (row,) = run("--other-norms", "--factors", "8")
    assert row["perplexity"] == {
        "unpruned": {"held_out": 1},
        "sliced": {"held_out": pytest.approx(8)},
    }


def test_the_document_has_the_tables_of_its_rows():
    document = (ROOT / "docs/exact.md").read_text()
    rows = exact.read_rows(ROOT / "benchmarks/h200/exact.jsonl")
    tables = [line for line in exact.table(rows) if line.startswith("|")]
    assert len(tables) > 60
    assert [line for line in tables if line not in document] == []
