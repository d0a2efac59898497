"""The benchmark of splits into keys and values, on tiny models."""

import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
from small_models import SMALL
from training_runs import packed

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import value_speeds
from values import best, splits

from reproduction.config import load_config
from statecut.models import create, save
from statecut.process import run_work

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "config" / "demo.yaml"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The script in a folder with a model of 16 x 24 and text."""
    save(create(SMALL["gated"], seed=1), tmp_path / "model")
    packed(tmp_path / "text", 64, slices={"held_out": (0, 4), "calibration": (4, 64)})
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["values.py", *arguments])
        runpy.run_path(str(ROOT / "benchmarks" / "values.py"), run_name="__main__")
        out = tmp_path / "rows.jsonl"
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    return run


CELLS = ("--models", "model", "--text", "text", "--sequences", "12", "--out", "rows.jsonl")


@pytest.mark.parametrize(
    ("whole", "share", "expected"),
    [
        ((128, 128), 1 / 2, [(64, 128), (128, 64), (96, 80), (80, 96)]),
        ((128, 128), 1 / 4, [(32, 128), (128, 32), (64, 64)]),
        ((128, 128), 1 / 8, [(16, 128), (128, 16), (64, 32), (32, 64)]),
        ((256, 256), 1 / 2, [(128, 256), (256, 128), (176, 176)]),
        ((16, 16), 1 / 2, []),
    ],
)
def test_a_share_of_the_state_is_left_by_keys_by_values_or_by_both(whole, share, expected):
    assert splits(*whole, share, 16) == expected
    assert all(math.prod(split) <= share * math.prod(whole) for split in expected)


def test_a_row_for_each_split_and_method(run, capsys):
    arguments = (*CELLS, "--methods", "fisher", "l1", "--shares", "0.5", "--multiple", "8")
    for _ in range(2):  # the second time there is nothing left to do
        rows = run(*arguments)
    assert [(row["d_k"], row["d_v"], row["method"]) for row in rows] == [
        (d_k, d_v, method)
        for d_k, d_v in ((8, 24), (16, 8), (8, 16))
        for method in ("fisher", "l1")
    ]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    for row in rows:
        whole = row["unpruned"]
        assert row["state_bytes"] / whole["state_bytes"] == row["d_k"] * row["d_v"] / (16 * 24)
        assert row["parameters"] < whole["parameters"]
        assert row["perplexity"].keys() == {"unpruned", "sliced", "refitted"}
    run("--table", "rows.jsonl")
    table, best = capsys.readouterr().out.split("\n\n")
    assert len(table.splitlines()) == 2 + len(rows)
    (line,) = best.splitlines()[2:]
    assert [f"{split} " in cell for split, cell in zip(
        ("8x24", "16x8", "8x16"), line.strip("| ").split(" | ")[4:], strict=True
    )] == [True] * 3  # fmt: skip
    assert line.count("**") == 2


def test_a_row_of_speeds_for_each_shape_and_its_ratios(run, capsys):
    names = ["gated_deltanet", "hybrid"]
    arguments = ("--config", str(DEMO), "--splits", "16x8", "--seconds", "0.01")
    for _ in range(2):
        rows = run("--speed", *names, *arguments, "--out", "rows.jsonl")
    assert [(row["model"], row["d_k"], row["d_v"]) for row in rows] == [
        (name, *split) for name in names for split in ((32, 32), (16, 8))
    ]
    for whole, row in zip(rows[::2], rows[1::2], strict=True):
        assert whole["parameters"] == load_config(DEMO).models[row["model"]].parameters
        assert row["ratios"]["state_bytes"] == 1 / 8
        assert row["ratios"]["parameters"] == row["parameters"] / whole["parameters"] < 1
        for part in ("layer", "forward", "training"):
            speed, of_whole = (r["speeds"][part]["tokens_per_s"]["value"] for r in (row, whole))
            assert row["ratios"][part]["tokens_per_s"] == speed / of_whole
        assert row["speeds"]["decoding"]["tokens_per_s_8"]["value"] > 0
        assert row["speeds"]["decoding"]["largest_batch"]["reason"] == "not measured: no GPU"
    capsys.readouterr()
    run("--table", "rows.jsonl")
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "| layer | forward | training | decoding, batch 8 | largest batch |" in head
    assert len(lines) == len(rows)


def test_a_worker_finds_the_layer_that_it_is_to_time(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    config = load_config(DEMO)
    spec = value_speeds.with_value_width(config.models["gated_deltanet"], 8)
    function, arguments = value_speeds.work("layer", spec, 16, config, "cpu", 0.01)
    worker = value_speeds.start_worker()
    outcome = run_work(function, *arguments, limit_s=300, own_process=True, worker=worker)
    assert outcome.reason == ""
    assert dict(outcome.values)["tokens_per_s"].value > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*CELLS, "--splits", "64"), "64: d_k and d_v, as in 64x128"),
        ((*CELLS, "--splits", "16x32"), "--splits 16x32: not less than the 16x24 of a model"),
        ((*CELLS, "--shares", "0.01"), "--shares 0.01: no widths that are multiples of 16 leave"),
        ((*CELLS, "--shares", "2"), "--shares 2: must lie between 0 and 1"),
        ((*CELLS, "--splits", "8x8", "--methods", "grad"), "--methods grad: it chooses no values"),
        ((*CELLS, "--recover-splits", "8x8"), "give both of --recover and --recover-splits"),
        (
            (*CELLS, "--config", str(DEMO), "--splits", "8x8", "--recover", "1",
             "--recover-splits", "8x16"),
            "--recover-splits 8x16: none of the splits that are cut",
        ),
        (("--text", "text", "--out", "rows.jsonl"), "give --models or --speed"),
        (("--speed", "x"), "--speed: give the --config whose models these are, and --out"),
        (
            ("--speed", "x", "--config", str(DEMO), "--out", "rows.jsonl"),
            "--speed x: no such model in --config; it has delta_net, ",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_said_before_any_work(run, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert message in f"{ended.value.code}\n{capsys.readouterr().err}"
    assert not Path("rows.jsonl").exists()


def test_the_document_has_the_best_of_the_rows():
    rows = (ROOT / "benchmarks" / "h200" / "values.jsonl").read_text().splitlines()
    lines = best([json.loads(row) for row in rows], ["wikitext_word_ppl"])[2:]
    assert len(lines) == 9
    document = (ROOT / "docs" / "values.md").read_text()
    for line in lines:
        cells = re.findall(r"(\*\*)?([\d.,]+)\1? \((\d+)x(\d+) \w+\)", line)
        shown = [f"{mark}{value}{mark} ({k} x {v})" for mark, value, k, v in cells]
        assert " | ".join(shown) in document


def test_the_document_has_the_speeds_of_the_rows():
    rows = (ROOT / "benchmarks" / "h200" / "values_speed.jsonl").read_text().splitlines()
    table = value_speeds.table([json.loads(row) for row in rows])
    assert "\n".join(table) in (ROOT / "docs" / "values.md").read_text()


def test_the_document_says_what_the_costs_of_each_side_are():
    """The growth of the logarithm of the perplexity, by the same rows."""
    rows = map(json.loads, (ROOT / "benchmarks" / "h200" / "values.jsonl").read_text().splitlines())
    costs = {}
    for row in rows:
        if row["method"] == "drrqr":
            refitted, whole = (
                row["perplexity"][stage]["wikitext_word_ppl"] for stage in ("refitted", "unpruned")
            )
            shares = tuple(row[side] / row["unpruned"][side] for side in ("d_k", "d_v"))
            costs[row["model"], *shares] = math.log(refitted / whole)
    document = (ROOT / "docs" / "values.md").read_text()
    models = {"delta_net_40M": "DeltaNet", "gated_deltanet_40M": "Gated DeltaNet",
              "hybrid_40M": "Hybrid"}  # fmt: skip
    for model, label in models.items():
        keys, values = costs[model, 0.5, 1], costs[model, 1, 0.5]
        cells = [keys, values, keys + values, costs[model, 0.5, 0.5], costs[model, 0.25, 1]]
        assert f"| {label} | {' | '.join(f'{cell:.3f}' for cell in cells)} |" in document
