"""The scripts in benchmarks/: they start, and measure what they say, on tiny models."""

import json
import random
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import lab
import numpy as np
import pandas as pd
import pytest
import recall
import repeated
import state_precision
import torch
import verdict
from small_models import SMALL
from training_runs import packed

from reproduction.config import load_config
from reproduction.reporting.frame import COLUMNS
from statecut import prune
from statecut.errors import InputError
from statecut.models.checkpoint import create, save
from statecut.models.delta_rule import l2_normalised, recurrent_delta_rule
from statecut.recovery.distillation import IGNORED

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_scripts_start(script, monkeypatch, capsys):
    """All names that they import exist."""
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    namespace = runpy.run_path(str(FOLDER / script))
    if "main" in namespace:
        with pytest.raises(SystemExit) as ended:
            namespace["main"]()
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A script's main in an empty folder: what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        script.main()
        return capsys.readouterr().out

    return run


def rows():
    return [json.loads(line) for line in Path("rows.jsonl").open()]


def a_model_and_its_text(name):
    save(create(SMALL[name], seed=1), Path("model"))
    packed(Path("text"), 64, slices={"held_out": (0, 4), "calibration": (4, 64)})
    return ["--models", "model", "--text", "text", "--out", "rows.jsonl"]


def test_the_lab_compares_a_cut_with_the_unpruned_model_of_its_own_training(tmp_path):
    cut = {"method": "fisher", "target": "kq", "compression": 0.5, "rft": "pre", "eps": "matched"}
    whole = {"method": "baseline", "target": "", "compression": 0.0, "rft": "none", "eps": "kept"}
    rows = [
        {**cut, "training": 0, "seed": 0, "value": 110.0},
        {**cut, "training": 0, "seed": 1, "value": 130.0},
        {**cut, "training": 1, "value": 220.0},
        {**cut, "eps": "kept", "training": 0, "value": 900.0},
        {**whole, "training": 0, "value": 100.0},
        {**whole, "training": 1, "value": 200.0},
    ]
    same = {"model": "m", "conv_sharing": "none", "metric": lab.WIKITEXT, "seed": 0}
    frame = pd.DataFrame([same | row for row in rows], columns=[*COLUMNS])
    frame.astype(COLUMNS).to_parquet(tmp_path / "results.parquet")
    results, cell = lab.Results(tmp_path), (lab.Lab("m"), "fisher", 0.5, "pre")
    assert results.over_trainings(*cell) == "15.0 ± 7.1"  # 20 and 10
    assert results.over_draws(*cell) == "20.0 ± 14.1"
    assert results.over_draws(*cell, lab.WIKITEXT, "kept") == "800.0"


def test_an_invented_run_needs_the_spread_of_the_lab():
    run = verdict.InventedRun(load_config(FOLDER.parent / "config" / "paper.yaml"))
    run.parts = {}
    with pytest.raises(InputError, match=r"no spread over draws of \('(gated_)?delta_?net_40M'"):
        run.judge(0.0, random.Random(0), Counter(), Counter())


TINY = {
    "layers": 1, "hidden": 16, "heads": 2, "head": 8, "keys": 6, "length": 16, "pairs": [2, 4],
    "steps": 4, "batch": 4, "epochs": 1, "rate": 1e-2, "sequences": 8, "held_out": 4,
}  # fmt: skip


@pytest.mark.parametrize("pairs", [1, 3, 12])
def test_every_key_that_is_asked_for_was_listed_with_its_one_value(pairs):
    drawn = recall.draw(pairs, 20, 32, 12, np.random.default_rng(0)).astype(np.int64)
    assert len(np.unique(drawn, axis=0)) > 10
    for ids, answers in zip(drawn, recall.answers(torch.from_numpy(drawn)), strict=True):
        keys, values = ids[0::2], ids[1::2]
        listed = dict(zip(keys[:pairs], values[:pairs], strict=True))
        assert len(listed) == pairs
        assert all(listed[key] == value for key, value in zip(keys, values, strict=True))
        assert max(keys) < 12 <= min(values)
        counts = np.unique(keys[pairs:], return_counts=True)[1]
        assert max(counts) - min(counts) <= 1  # asked for equally often
        assert answers[1::2].tolist() == [IGNORED] * pairs + values[pairs:].tolist()
        assert (answers[0::2] == IGNORED).all()


def test_the_loss_is_of_answers_alone(monkeypatch):
    monkeypatch.setattr(recall, "SETTINGS", {**TINY, "keys": 12})
    config = recall.Bench(Path(), "cpu", Path()).config("delta_net")
    ids = torch.from_numpy(recall.draw(3, 20, 32, 12, np.random.default_rng(0)).astype(np.int64))
    model = create(config, seed=0)
    logits = model(ids).logits[:, 6:-1:2]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 7::2].flatten())
    assert model(ids, labels=ids).loss.item() != pytest.approx(expected.item(), rel=1e-3)
    assert recall.answers_only(model)(ids, labels=ids).loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("model", recall.MODELS)
def test_recall_from_training_to_the_table(model, run, monkeypatch):
    monkeypatch.setattr(recall, "SETTINGS", TINY)
    cells = ["--folder", "kept", "--out", "rows.jsonl", "--recover", 2, "--models", model,
             "--methods", "fisher", "rand", "--widths", 4]  # fmt: skip
    run(recall, *cells)
    before = rows()
    assert [row["method"] for row in before] == [None, "fisher", "rand"]
    assert list(before[1]["accuracy"]) == ["sliced", "refitted", "recovered"]
    # What was lost is computed again, the same, with the model that is there.
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in before[:-1]))
    assert len(run(recall, *cells).splitlines()) == 1
    assert [row["accuracy"] for row in rows()] == [row["accuracy"] for row in before]


@pytest.mark.parametrize("channelwise", [False, True])
def test_a_rule_that_holds_its_state_in_a_type_rounds_the_state_alone(channelwise):
    torch.manual_seed(0)
    q, k = (l2_normalised(torch.randn(2, 17, 3, 6)) for _ in range(2))
    v, beta = torch.randn(2, 17, 3, 5), torch.rand(2, 17, 3)
    g = -torch.rand(2, 17, 3, 6) if channelwise else -torch.rand(2, 17, 3)
    inputs = q, k, v, beta, g, 6**-0.5, torch.randn(2, 3, 6, 5)
    exact = recurrent_delta_rule(*inputs)
    held = {
        t: state_precision.delta_rule_held_in(t)(*inputs) for t in state_precision.TYPES.values()
    }
    torch.testing.assert_close(held[torch.float32], exact)
    o, state = held[torch.bfloat16]
    assert torch.equal(state, state.bfloat16().float())
    assert not torch.equal(o, o.bfloat16().float())
    errors = [(o - exact[0]).norm() for o, _ in held.values()]
    assert errors == sorted(errors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_in_eight_bits_each_head_has_a_scale_and_nothing_is_rounded_twice(dtype, size):
    state = size * torch.randn(2, 3, 8, 8) * torch.tensor([1.0, 100.0, 0.0])[:, None, None]
    held = state_precision.rounded(state, dtype)
    largest = state.abs().amax((-2, -1), keepdim=True)
    step = torch.finfo(dtype).eps / 2  # the largest relative error of the largest numbers
    assert ((held - state).abs() <= step * largest).all()
    assert torch.equal(state_precision.rounded(held, dtype), held)


def test_a_token_is_repeated_if_its_sequence_has_had_it_and_rare_by_all_of_the_text(monkeypatch):
    monkeypatch.setattr(repeated, "RARE", 4)  # at most 3 of these 12
    marked = repeated.kinds(torch.tensor([[1, 2, 1, 2, 3, 3], [1, 4, 4, 4, 4, 1]]))
    places = {kind: marks.nonzero().tolist() for kind, marks in marked.items()}
    assert places == {
        "rare, repeated": [[0, 2], [0, 4]],
        "rare, new": [[0, 0], [0, 3]],
        "common": [[0, 1], [1, 0], [1, 1], [1, 2], [1, 3], [1, 4]],
    }


def test_repeated_words_from_models_to_the_table(run, monkeypatch):
    _, _, *arguments = a_model_and_its_text("gated")
    prune("model", "cut", method="l1", ratio=0.5, round_to=1, refit=False)
    arguments = "--models", "model", "cut", "model", *arguments, "--sequences", 8
    with pytest.raises(InputError, match="text: no token is rare, repeated; give more sequences"):
        run(repeated, *arguments)
    monkeypatch.setattr(repeated, "RARE", 50)  # as the text is short
    run(repeated, *arguments)
    cut, unpruned = before = rows()
    assert [unpruned[kind]["rise"] for kind in repeated.KINDS] == [0.0] * 3
    assert all(cut[kind]["rise"] for kind in repeated.KINDS)
    assert (cut["refitted"], unpruned["refitted"]) == (False, False)
    run(repeated, *arguments)
    assert rows() == before  # what is there is not measured again
    assert run(repeated, "--rows", "rows.jsonl", "--table").count(" ± ") == 2 * 3


@pytest.mark.parametrize("small", ["delta_net", "gated_value_heads"])
def test_states_in_fewer_bits_from_a_model_to_the_table(small, run):
    arguments = [*a_model_and_its_text(small), "--states", "float32", "float8_e4m3"]
    prune("model", "cut", method="l1", ratio=0.5, round_to=1, refit=False)
    arguments[1:2] = "model", "cut"
    run(state_precision, *arguments)
    own, emulated, coarse, *_ = before = rows()
    assert emulated["perplexity"] == pytest.approx(own["perplexity"], rel=1e-5)
    assert coarse["perplexity"] != pytest.approx(own["perplexity"], rel=1e-5)
    shares = [(row["folder"], row["state"], row["bytes"] / own["bytes"]) for row in before]
    assert shares == [
        ("model", "own kernels", 1), ("model", "float32", 1), ("model", "float8_e4m3", 1 / 4),
        ("cut", "own kernels", 1 / 2), ("cut", "float32", 1 / 2), ("cut", "float8_e4m3", 1 / 8),
    ]  # fmt: skip
    # What was lost is computed again, the same, and nothing else.
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in before[:-1]))
    assert len(run(state_precision, *arguments).splitlines()) == 1
    assert rows()[-1]["perplexity"] == before[-1]["perplexity"]
    head, _, *lines = state_precision.table(before).splitlines()
    assert head.endswith("| 100% of the keys | 50% of the keys |")
    assert [re.findall(r"\((.+?)\)", line) for line in lines] == [["all", "1/2"], ["1/4", "1/8"]]
    other = [{**row, "folder": "other"} for row in before]
    with pytest.raises(InputError, match="other: the rows have another"):
        state_precision.table([*before, *other])
