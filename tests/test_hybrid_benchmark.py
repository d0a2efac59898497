"""The benchmark of hybrids, on a tiny one."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import hybrid
from hybrid import TINY, Bench, Job, Prompt, Step, changes, greedy_generation

from statecut.models.architectures import architecture


@pytest.fixture
def options(tmp_path):
    arguments = ["--tiny", "--out", str(tmp_path / "rows.jsonl"), "--folder", str(tmp_path)]
    options = hybrid.parser().parse_args([*arguments, "--each", "0.01"])
    for option, value in TINY.items():
        setattr(options, option, value)
    return options


@pytest.fixture
def bench(options):
    return Bench(options, "cpu")


def test_the_shapes_are_those_of_24_delta_and_8_softmax_layers():
    cache = architecture(hybrid.SHAPES).cache(hybrid.SHAPES)
    assert len(cache.shape.layers) == 24
    assert cache.softmax[0].layers == 8
    assert cache.shape.state_bytes() == 24 * 32 * 128 * 128 * 4


def test_a_step_in_place_changes_the_cache_as_generation_does(bench):
    model = bench.model(16)
    prompt = Prompt(model, 9)
    generation = greedy_generation(model, prompt, batch=3)
    tokens, _ = generation.run(1)
    expected = changes(generation.state, prompt)
    step = Step(model, prompt, 3)
    step.run()
    step.run()  # somewhere else; the check goes back to the prompt
    step.check(step.run, expected)
    assert torch.equal(step.last, tokens)
    torch.testing.assert_close(changes(step.cache, prompt), expected)
    with pytest.raises(hybrid.NotMeasured, match="changes otherwise than by `generate`"):
        step.check(lambda: None, expected)


def test_decoding_has_bytes_and_a_speed_for_each_batch_and_way(bench):
    sizes, *speeds = hybrid.decode(bench, Job("decode", 16))
    assert sizes["recurrent_agrees"]
    assert sizes["measured_bytes"]["recurrent"] == 3 * 4 * 16 * 32 * 4
    assert sizes["computed_bytes_at_4096"]["softmax"] == 2 * 32 * 4096 * 2
    assert [(row["batch"], row["way"]) for row in speeds] == [
        (4, "generate"), (4, "step"), (1, "generate"), (1, "step"),
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 for row in speeds)


def test_calibration_in_both_ways_and_refit_have_seconds_and_memory(bench):
    for part in ("layerwise", "gradients", "refit"):
        (row,) = hybrid.MEASURES[part](bench, Job(part))
        assert "error" not in row
        assert row["tokens_per_s"] == pytest.approx(8 * 64 / row["seconds"], rel=0.1)
        assert row["peak_gib"] > 0


def test_a_batch_that_does_not_fit_is_halved(bench, monkeypatch):
    tried = []
    monkeypatch.setattr(hybrid, "fits", lambda model, ids: tried.append(len(ids)) or len(ids) < 3)
    (row,) = hybrid.gradients(bench, Job("gradients"))
    assert tried == [4, 2]
    assert row["batch"] == 2


def test_a_job_writes_rows_and_errors_and_is_not_run_again(options):
    options.contexts = [4]
    hybrid.measure(options, Job("decode", 16))
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    assert rows[-2] == {"part": "decode", "d_k": 16, "context": 4, "error": "no GPU"}
    assert (rows[-1]["whole"], rows[-1]["errors"]) == (True, 1)
    options.parts, options.widths = ["decode", "gradients"], [32, 16]
    todo = [Job("decode", 32), Job("decode", 16), Job("gradients")]
    assert hybrid.jobs_to_do(options) == todo
    hybrid.write(options.out, {**rows[-1], "errors": 0})
    assert hybrid.jobs_to_do(options) == [todo[0], todo[2]]


def test_a_job_without_time_is_written_as_not_run(options):
    options.seconds = 0
    hybrid.run(options, [Job("gradients")], [])
    assert json.loads(options.out.read_text())["error"] == "not run: --seconds were over"


def test_the_document_has_the_rows_of_the_benchmark():
    root = Path(__file__).parents[1]
    rows = (root / "benchmarks" / "h200" / "hybrid.jsonl").read_text().splitlines()
    lines = hybrid.table([json.loads(row) for row in rows])
    document = (root / "docs" / "hybrids.md").read_text()
    assert len(lines) == 8
    assert all(line in document for line in lines)


def test_a_cell_that_is_missing_moves_no_other():
    rows = [
        {"part": "decode", "d_k": 128, "context": 4096, "error": "ended"},
        {"part": "decode", "d_k": 96, "context": 4096, "sequences": 1, "tokens_per_s": 1.0},
        {"part": "decode", "d_k": 96, "context": 4096, "sequences": 7, "tokens_per_s": 9.0},
    ]
    lines = hybrid.table(rows)
    assert lines[0] == "| d_k | 128 | 96 |"
    assert lines[2] == "| sequences that fit, of 4,096 tokens | not measured | 7 |"


def test_rows_of_other_settings_are_not_mixed(options):
    whole = {"part": "decode", "d_k": 32, "whole": True, "errors": 0}
    options.parts, options.widths = ["decode"], [32, 16]
    options.out.write_text(json.dumps(whole | {"settings": hybrid.settings(options)}))
    assert hybrid.jobs_to_do(options) == [Job("decode", 16)]
    options.batches = [2]
    with pytest.raises(SystemExit, match="other settings"):
        hybrid.jobs_to_do(options)
