"""The figure of state bytes: which points its curves have."""

import json
import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import state_figure
from state_figure import WHOLE, precision_curves, recall_curves


def precision(method, ratio, stage, state, size, perplexity):
    return {
        "model": "delta_net_40M", "method": method, "ratio": ratio, "stage": stage,
        "state": state, "bytes": size, "perplexity": perplexity,
    }  # fmt: skip


PRECISION = [
    precision(None, 0.0, "whole", "own kernels", 800, 20.1),
    precision(None, 0.0, "whole", "float32", 800, 20.0),
    precision(None, 0.0, "whole", "float16", 400, 20.5),
    precision(None, 0.0, "whole", "bfloat16", 400, 21.0),
    precision("drrqr", 0.5, "sliced", "float32", 400, 30.0),
    precision("drrqr", 0.5, "refitted", "float32", 400, 24.0),
    precision("drrqr", 0.5, "refitted", "bfloat16", 200, 25.0),
]
RECALL = [
    {"model": "delta_net", "method": None, "width": 64, "seed": 0,
     "accuracy": {"unpruned": {"4": 1.0, "8": 0.8}, "unpruned, float8_e4m3": {"4": 0.6, "8": 0.4}}},
    {"model": "delta_net", "method": "drrqr", "width": 16, "seed": 0,
     "accuracy": {"sliced": {"4": 0.5, "8": 0.3}}},
]  # fmt: skip


def test_bits_and_channels_are_compared_by_bytes():
    assert precision_curves(PRECISION) == {
        "delta_net_40M": {
            (None, WHOLE): {1.0: 20.0, 0.5: 20.5},  # the better one of two types
            ("drrqr", "sliced"): {1.0: 20.0, 0.5: 30.0},
            ("drrqr", "refitted"): {1.0: 20.0, 0.5: 24.0},
            ("drrqr", "refitted, in fewer bits/0.5"): {0.5: 24.0, 0.25: 25.0},
        }
    }


def test_recall_is_a_mean_over_numbers_of_pairs():
    assert recall_curves(RECALL) == {
        "delta_net": {
            (None, WHOLE): {1.0: 90.0, 0.25: 50.0},
            ("drrqr", "sliced"): {1.0: 90.0, 0.25: 40.0},
        }
    }


def test_the_figure_is_the_same_every_time(tmp_path, monkeypatch):
    for name, rows in (("p.jsonl", PRECISION), ("r.jsonl", RECALL)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    for out in ("one.svg", "two.svg"):
        words = ["--precision", "p.jsonl", "--recall", "r.jsonl", "--out", out]
        monkeypatch.setattr(sys, "argv", ["state_figure.py", *words])
        runpy.run_path(state_figure.__file__, run_name="__main__")
    drawn = Path("one.svg").read_text()
    assert drawn == Path("two.svg").read_text()
    assert "DRRQR" in drawn
    assert WHOLE in drawn
