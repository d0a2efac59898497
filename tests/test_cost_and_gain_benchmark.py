"""A run's perplexities and speeds side by side."""

import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import cost_and_gain

PPL = "wikitext_word_ppl"


def test_costs_are_means_over_seeds_and_gains_are_ratios():
    whole, half = ("m", "none", "baseline", "", 0.0), ("m", "none", "fisher", "kq", 0.5)
    timed = ("m", "none", "", "", 0.5)
    rows = [
        (*whole, "none", PPL, 100.0),
        (*half, "pre", PPL, 120.0), (*half, "pre", PPL, 130.0), (*half, "refit", PPL, 110.0),
        (*whole, "none", "decoding_graph_tokens_per_s_8", 10.0),
        (*whole, "none", "decoding_graph_tokens_per_s_256", 1000.0),
        (*timed, "none", "decoding_graph_tokens_per_s_256", 1500.0),
        (*whole, "none", "decoding_state_mib", 2.0), (*timed, "none", "decoding_state_mib", 1.0),
        (*whole, "none", "decoding_largest_batch", 64.0),
        (*timed, "none", "decoding_largest_batch", float("nan")),
        ("other", "none", "fisher", "kq", 0.5, "pre", PPL, 1.0),  # was not refitted
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=[*cost_and_gain.VARIANT, "value"])
    head, _, *lines = cost_and_gain.table(frame, "fisher", PPL)
    assert "tokens/s, 256 at once" in head
    assert lines == [
        "| m | none | 100.0 |  |  |  | 2.00 | 1,000 | 64 |",
        "| | 50% | 125.0 | 110.0 | - | - | 1.00 | 1.50 times | - |",
    ]


def test_cuts_of_a_table_have_one_eps():
    rows = [("", "none", "kept"), ("kq", "refit", "kept"), ("kq", "refit", "matched")]
    frame = pd.DataFrame(rows, columns=["target", "rft", "eps"])
    for eps, places in ((None, [0, 2]), ("matched", [0, 2]), ("kept", [0, 1])):
        assert [*cost_and_gain.with_eps(frame, eps).index] == places
    assert [*cost_and_gain.with_eps(frame[:2], None).index] == [0, 1]


def test_the_readme_has_the_labs_table():
    root = Path(__file__).parents[1]
    frame = cost_and_gain.read_frame(root / "results/lab/h200/results.parquet")
    table = "\n".join(cost_and_gain.table(frame, "fisher", PPL))
    assert f"\n\n{table}\n\n" in (root / "README.md").read_text()


def test_what_was_not_refitted_is_said(monkeypatch, capsys):
    results = Path(__file__).parents[1] / "results/demo/results.parquet"
    assert results.is_file(), "the demo is not there: run `make demo` first"
    monkeypatch.setattr(sys, "argv", ["cost_and_gain.py", str(results), "--method", "x"])
    with pytest.raises(SystemExit):
        cost_and_gain.main()
    assert f"has no {PPL} of models refitted by x; it has: drrqr " in capsys.readouterr().err
