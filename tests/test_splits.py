"""`statecut prune` with `--state`, `--keys` and `--values`: which widths are tried and written."""

import itertools
import os
import re
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL, rewritten, workplace

import statecut
from statecut.cli import main
from statecut.errors import InputError
from statecut.evaluation.perplexity import measure, pack_text
from statecut.models.checkpoint import Checkpoint
from statecut.models.description import Description
from statecut.pruning import prune as pruning
from statecut.pruning.budget import MOST, STEPS, cuts_within, in_words
from statecut.pruning.request import Request
from statecut.pruning.slicing import Keep, slice_model
from statecut.record import Record
from statecut.serving.engines import ENGINES

TEXT = {"sequences": 9, "length": 40, "rows": 100}


def described(width, value_width):
    widths = {"linear_key_head_dim": width, "linear_value_head_dim": value_width}
    return Description({**SMALL["qwen3_next"], **widths}, "model")


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 64),
    value_width=st.integers(1, 64) | st.just(128),
    share=st.sampled_from([0.9, 0.75, 0.5, 0.3, 0.25, 0.125, 0.01]),
    engine=st.sampled_from([None, *ENGINES.values()]),
    steps=st.sampled_from([STEPS, (16,), (5,)]),
)
def test_splits_keep_to_the_budget_the_grid_and_the_engine(
    width, value_width, share, engine, steps
):
    model = described(width, value_width)
    full = model.shape
    step, splits = cuts_within(model, share, engine, steps)

    def usable(split):
        multiples = (split.width % step == 0 or split.width == width) and (
            split.value_width % step == 0 or split.value_width == value_width
        )
        within = split.state_bytes() <= share * full.state_bytes()
        return multiples and within and (engine is None or engine.serves("qwen3_next", split))

    assert len(splits) <= MOST
    assert splits == sorted(splits, key=lambda split: split.width)
    for split in splits:
        assert usable(split)
        # One more channel of either would be too much.
        for more in range(1, step + 1):
            wider = replace(split, width=min(split.width + more, width))
            taller = replace(split, value_width=min(split.value_width + more, value_width))
            assert all(other == split or not usable(other) for other in (wider, taller))
    if not splits:
        step, sizes = steps[-1], itertools.product(range(1, width + 1), range(1, value_width + 1))
        assert not any(usable(replace(full, width=w, value_width=v)) for w, v in sizes)


@pytest.mark.parametrize(
    ("shape", "share", "engine", "steps", "step", "splits"),
    [
        ((128, 128), 0.5, None, STEPS, 16, "64 x 128, 80 x 96, 96 x 80, 128 x 64"),
        ((128, 128), 0.25, None, STEPS, 16, "32 x 128, 48 x 80, 64 x 64, 80 x 48, 128 x 32"),
        ((128, 128), 0.25, "tensorrt-llm", STEPS, 16, "32 x 128"),  # read for d_v 128 alone
        ((128, 128), 0.25, "llama.cpp", STEPS, 16, "64 x 64"),
        ((128, 128), 0.5, "llama.cpp", STEPS, 16, "64 x 64"),  # there is none that is closer
        ((256, 512), 0.25, None, STEPS, 16, "64 x 512, 96 x 336, 128 x 256, 176 x 176, 256 x 128"),
        ((512, 128), 0.5, None, STEPS, 16, "256 x 128"),  # no kernel takes wider keys
        ((32, 32), 0.25, None, STEPS, 8, "8 x 32, 16 x 16, 32 x 8"),
        ((32, 32), 0.125, None, STEPS, 8, "8 x 16, 16 x 8"),
        ((16, 24), 0.25, None, STEPS, 4, "4 x 24, 8 x 12, 12 x 8"),  # 16 x 4 leaves much less
        ((16, 24), 0.25, None, (6,), 6, "6 x 12, 16 x 6"),
        ((16, 24), 0.25, None, (1,), 1, "4 x 24, 6 x 16, 8 x 12, 12 x 8, 16 x 6"),
    ],
)
def test_splits_of_models(shape, share, engine, steps, step, splits):
    found = cuts_within(described(*shape), share, engine and ENGINES[engine], steps)
    assert (found[0], ", ".join(map(in_words, found[1]))) == (step, splits)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models of d_k 16 and d_v 24, and of 32 and 32."""
    square = {**SMALL["qwen3_next"], "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    return workplace(tmp_path_factory.mktemp("splits"), "gated", qwen3_next=square)


@pytest.fixture
def prune(root, tmp_path):
    def prune(model="gated", out="out", **options):
        text = {"text": root / "text.jsonl", **TEXT}
        return statecut.prune(root / model, tmp_path / out, **text, **options)

    return prune


def test_the_best_split_of_a_budget_is_written(root, prune, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    calibrations, calibrate = [], pruning.calibrate_folder

    def counted(*args, **kwargs):
        calibrations.append(kwargs["values"])
        return calibrate(*args, **kwargs)

    monkeypatch.setattr(pruning, "calibrate_folder", counted)
    pruned = prune(state=0.25)
    assert calibrations == [True]  # one for all
    splits = "4 x 24, 8 x 12, 12 x 8 (multiples of 4: those of 16 are too few)"
    assert f"--state 0.25: comparing d_k x d_v of {splits}" in caplog.text
    _, *rows = pruned.record.last["compared"]
    assert [row.split()[:2] for row in rows] == [["4", "24"], ["8", "12"], ["12", "8"]]
    best = [min(map(float, row.split()[4:6])) for row in rows]
    (written,) = (row for row in rows if row.endswith("  written"))
    assert rows.index(written) == best.index(min(best))
    shape = Checkpoint(tmp_path / "out").shape
    assert [shape.width, shape.value_width] == [*map(int, written.split()[:2])]

    # What was measured is the model in the folder.
    slices = {"calibration": 9, "held_out": 2}
    unpruned, text = Checkpoint(root / "gated"), root / "text.jsonl"
    pack_text(text, unpruned, tmp_path / "packed", slices=slices, length=40, seed=0)
    measured = pruned.record.last["measured"]
    which = "refitted" if pruned.record.last["refit"]["written"] else "cut"
    for folder, name in ((tmp_path / "out", which), (root / "gated", "unpruned")):
        known = measured["models"][name]["perplexity"]
        assert measure(Checkpoint(folder), tmp_path / "packed", "cpu") == pytest.approx(known)
    assert measured["tokens"] == 80

    assert Record.read(tmp_path / "out") == pruned.record
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f"\n    {row}\n" in card for row in rows)
    assert not list(tmp_path.glob(".*"))


def test_text_held_out_decides_and_nothing_else(root, prune, tmp_path, monkeypatch):
    """By what would be written: refitted, or cut alone where the refit made it worse."""
    values = {(4, 24): (6.0, 9.0), (8, 12): (8.0, 5.0), (12, 8): (7.0, 6.5)}
    texts, fitted_on, refit = [], [], pruning.refit

    def known(model, ids, **_):
        texts.append(ids)
        shape = model.shape
        if (shape.width, shape.value_width) not in values:
            return 1.0
        return values[shape.width, shape.value_width][model.folder.name == "refitted"]

    def observed(student, teacher, ids, **options):
        fitted_on.append(ids)
        return refit(student, teacher, ids, **options)

    monkeypatch.setattr("statecut.evaluation.perplexity.perplexity", known)
    monkeypatch.setattr(pruning, "refit", observed)
    pruned = prune(state=0.25)
    shape = Checkpoint(pruned.folder).shape
    assert (shape.width, shape.value_width) == (8, 12)
    assert pruned.record.last["refit"]["written"]
    assert pruned.warnings == ()
    assert len(texts) == 1 + 2 * 3  # the unpruned model's once
    assert all(torch.equal(ids, texts[0]) for ids in texts)
    held_out = {tuple(row) for row in texts[0].tolist()}
    assert not held_out & {tuple(row) for ids in fitted_on for row in ids.tolist()}

    values |= {(8, 12): (4.0, 5.0), (4, 24): (9.0, 4.05), (12, 8): (7.0, 4.1)}
    pruned = prune(state=0.25, out="again")
    assert not pruned.record.last["refit"]["written"]
    assert pruned.record.numbers()[0] == ["", "unpruned", "cut", "refitted, left out"]
    worse, near = pruned.warnings
    assert worse.startswith("the refit did not lower the perplexity of the text held out")
    assert near.startswith("within 2% of the best: 4 x 24. Other text may choose otherwise")
    kept = pruned.record.last["cut"]["kept"]
    changes = {side: Keep(torch.tensor(channels)) for side, channels in kept.items()}
    slice_model(Checkpoint(root / "gated"), **changes, out=tmp_path / "cut", dtype=None)
    assert Checkpoint(pruned.folder).digest() == Checkpoint(tmp_path / "cut").digest()


@pytest.mark.parametrize(("keys", "values"), [(6, 10), (None, 10), (6, None), (16, 10)])
def test_widths_by_hand_are_those_of_the_library_and_need_no_text(root, tmp_path, keys, values):
    model, own = root / "gated", {"method": "l1", "refit": False}
    pruned = statecut.prune(model, tmp_path / "out", keys=keys, values=values, **own)
    cut = pruned.record.last["cut"]
    assert (cut["keys"], cut["values"]) == ([keys or 16, 16], [values or 24, 24])
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("value channels per head: 10 of 24\n" in card) == (values is not None)
    assert ("key channels per head: 6 of 16\n" in card) == (keys == 6)
    kept = statecut.select(model, method="l1", keys=6 if keys == 6 else None, values=values)
    slice_model(Checkpoint(model), **kept.changes(), out=tmp_path / "expected", dtype=None)
    folders = (tmp_path / "out", tmp_path / "expected")
    assert len({Checkpoint(folder).digest() for folder in folders}) == 1


BAD = [
    ({}, "how much to cut is missing: give one of --ratio, --state, or --keys and"),
    ({"ratio": 0.5, "state": 0.5}, "--ratio 0.5 --state 0.5: give one of"),
    ({"state": 0.5, "keys": 8}, "--state 0.5 --keys 8: give one of"),
    ({"state": 1}, "--state 1: must lie in (0, 1), the share of the recurrent state"),
    ({"state": float("nan")}, "--state nan: must lie in (0, 1)"),
    ({"state": 0.5, "refit": False}, "--no-refit: --state compares"),
    ({"state": 0.001}, "leaves so little of the state; the smallest is 1 x 1: give --state 0.0027"),
    ({"state": 0.25, "round_to": 16}, "in multiples of 16 leaves so little of the state; the sma"),
    ({"state": 0.5, "method": "grad"}, "method grad chooses no value channels: fisher, drrqr"),
    ({"state": 0.5, "method": "drrqr", "options": {"activations": "normalised"}}, "no L2 norm"),
    ({"keys": 17}, "--keys 17 --values 24: a head of "),
    ({"values": 25}, "24 value channels; give fewer of"),
    ({"values": 0}, "--values 0: must be 1 or more"),
    ({"keys": 16, "values": 24}, "--keys 16 --values 24: a head of"),
    ({"keys": 5, "round_to": 4}, "--round-to 4: --keys 5 is not rounded"),
    ({"keys": 16, "values": 8, "target": "k"}, "--target k: it says what key channels are judged"),
    ({"state": 0.5, "engine": "vllm"}, "no gated_deltanet model is known to run right in vLLM"),
]
BAD_FOR_ENGINES = [
    ({"state": 0.1, "engine": "llama.cpp"}, "the smallest is 16 x 16: give --state 0.25 or more"),
    ({"keys": 16, "values": 24, "engine": "llama.cpp"}, "does not take d_k 16 with d_v 24; it"),
    ({"keys": 24, "engine": "sglang"}, "SGLang does not take d_k 24 with d_v 32; it takes d_k"),
]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [*(("gated", *case) for case in BAD), *(("qwen3_next", *case) for case in BAD_FOR_ENGINES)],
)
def test_bad_options_are_refused_without_torch(root, tmp_path, model, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Request(root / model, tmp_path, text=root / "text.jsonl", **options).plan()


@pytest.mark.parametrize("options", [{"state": 0.5}, {"values": 8}])
def test_a_model_whose_values_cannot_be_cut_is_refused_before_any_work(
    root, tmp_path, monkeypatch, options
):
    monkeypatch.setattr(pruning, "pack_text", None)
    bias = {"model.layers.1.attn.o_norm.bias": torch.zeros(24)}
    model = rewritten(root / "gated", tmp_path / "model", lambda tensors: tensors.update(bias))
    options |= {"text": root / "text.jsonl", **TEXT}
    with pytest.raises(InputError, match=r"o_norm.bias: values are cut only where the norm of the"):
        statecut.prune(model, tmp_path / "out", **options)


def test_a_comparison_needs_room_for_three_models(prune, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    sizes = []
    for options in ({"keys": 4, "refit": False}, {"keys": 4}, {"state": 0.25, "round_to": 4}):
        with pytest.raises(InputError, match=r"out needs [\d,]+ bytes") as error:
            prune(**options)
        sizes.append(int(re.search(r"needs ([\d,]+)", str(error.value))[1].replace(",", "")))
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_killed_comparison_leaves_what_was_there_and_nothing_else(
    root, tmp_path, capsys, monkeypatch, number
):
    model, out = root / "gated", tmp_path / "before"
    statecut.prune(model, out, ratio=0.5, method="l1", refit=False)
    before, calls, refit = Checkpoint(out).digest(), [], pruning.refit

    def killed(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return refit(*args, **kwargs)

    monkeypatch.setattr(pruning, "refit", killed)
    text = ["--text", root / "text.jsonl", "--sequences", 9, "--length", 40]
    assert main([*map(str, ["prune", model, out, "--state", 0.25, "--force", *text])]) == 130
    assert capsys.readouterr().err.endswith("statecut: interrupted\n")
    assert Checkpoint(out).digest() == before
    assert not list(tmp_path.glob(".*"))
