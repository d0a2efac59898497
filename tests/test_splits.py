"""`statecut prune --state`, `--keys` and `--values`: which widths are tried, which are written."""

import itertools
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_models import SMALL
from statecut.card import stored_facts
from statecut.pruning.outcome import Candidate, Outcome
from training_runs import sentences

from reproduction.new_tokenizers import train_tokenizer
from statecut.cli import main
from statecut.data.packing import PackedTokens
from statecut.evaluation.perplexity import HeldOut, perplexity
from statecut.models import create, load, save
from statecut.models.architectures import gated_deltanet
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import MixerShape
from statecut.pruning.budget import CLOSE, MOST, STEPS, cuts_within, in_words
from statecut.pruning.prune import pack_text
from statecut.pruning.refit import refit
from statecut.pruning.select import select
from statecut.pruning.slicing import slice_model
from statecut.pruning.statistics import ModelStatistics
from statecut.serving.engines import ENGINES

# Which splits there are


class Shaped:
    """All of a checkpoint that its splits depend on."""

    folder = "model"
    architecture = gated_deltanet.ARCHITECTURE

    def __init__(self, width, value_width):
        self.shape = MixerShape((0,), 1, width, 1, value_width)
        self.config = {
            "model_type": "gated_deltanet", "num_hidden_layers": 1, "num_heads": 1,
            "head_dim": width, "expand_v": value_width / width,
        }  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 64),
    value_width=st.integers(1, 64),
    share=st.sampled_from([0.9, 0.75, 0.5, 0.3, 0.25, 0.125, 0.01]),
    engine=st.sampled_from([None, *ENGINES.values()]),
    steps=st.sampled_from([STEPS, (16,), (5,)]),
)
def test_splits_keep_to_the_budget_the_grid_and_the_engine(
    width, value_width, share, engine, steps
):
    model = Shaped(width, value_width)
    full = model.shape
    step, splits = cuts_within(model, share, engine, steps)

    def usable(split):
        return (
            split.state_bytes() <= share * full.state_bytes()
            and (engine is None or engine.takes(split.width, split.value_width))
            and (split.width % step == 0 or split.width == width)
            and (split.value_width % step == 0 or split.value_width == value_width)
        )

    assert len(splits) <= MOST
    assert splits == sorted(splits, key=lambda split: split.width)
    for split in splits:
        assert usable(split)
        # One more channel of either would be too much.
        for more in range(1, step + 1):
            for wider in (
                replace(split, width=min(split.width + more, width)),
                replace(split, value_width=min(split.value_width + more, value_width)),
            ):
                assert wider == split or not usable(wider)
    if not splits:
        sizes = itertools.product(range(1, width + 1), range(1, value_width + 1))
        grid = [replace(full, width=w, value_width=v) for w, v in sizes]
        step = steps[-1]
        assert not any(map(usable, grid))


@pytest.mark.parametrize(
    ("shape", "share", "engine", "step", "splits"),
    [
        ((128, 128), 0.5, None, 16, "64 x 128, 80 x 96, 96 x 80, 128 x 64"),
        ((128, 128), 0.25, None, 16, "32 x 128, 48 x 80, 64 x 64, 80 x 48, 128 x 32"),
        ((128, 128), 0.25, "mlx", 16, "32 x 128, 64 x 64, 128 x 32"),
        ((128, 128), 0.25, "llama.cpp", 16, "64 x 64"),
        ((128, 128), 0.5, "llama.cpp", 16, "64 x 64"),  # there is none that is closer
        ((256, 512), 0.25, None, 16, "64 x 512, 96 x 336, 128 x 256, 176 x 176, 256 x 128"),
        ((512, 128), 0.5, None, 16, "256 x 128"),  # no kernel takes wider keys
        ((32, 32), 0.25, None, 8, "8 x 32, 16 x 16, 32 x 8"),
        ((32, 32), 0.125, None, 8, "8 x 16, 16 x 8"),
        ((16, 24), 0.25, None, 4, "4 x 24, 8 x 12, 12 x 8"),
    ],
)
def test_splits_of_models(shape, share, engine, step, splits):
    model = Shaped(*shape)
    found = cuts_within(model, share, engine and ENGINES[engine])
    assert (found[0], ", ".join(map(in_words, found[1]))) == (step, splits)


def test_splits_that_leave_much_less_than_the_budget_are_not_among_others():
    _, splits = cuts_within(Shaped(16, 24), 0.25, None)
    assert all(split.state_bytes() >= CLOSE * 4 * 96 for split in splits)
    assert "16 x 4" not in map(in_words, splits)


# The command


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Models with a tokenizer that fits them, and text."""
    root = tmp_path_factory.mktemp("splits")
    train_tokenizer(sentences(60), root / "tokenizer", vocabulary_size=270)
    square = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    for name, config in {
        "gated": SMALL["gated"],  # d_k 16, d_v 24
        "delta_net": SMALL["delta_net"],
        "qwen3_next": {**SMALL["qwen3_next"], **square},
    }.items():
        model = create({**config, "vocab_size": 270}, seed=1)
        save(model, root / name, tokenizer=root / "tokenizer")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sentences(400))
    (root / "text.jsonl").write_text(lines)
    return root


def prune(root, *more, model="gated", out="out"):
    arguments = ["prune", root / model, root / out, "--text", root / "text.jsonl",
                 "--sequences", "9", "--length", "40", "--rows", "100", *more]  # fmt: skip
    return main([str(argument) for argument in arguments])


def widths(folder):
    shape = Checkpoint(folder).shape
    return shape.width, shape.value_width


def rows(shown):
    """Of the table: d_k, d_v, perplexity as cut, refitted, and whether it was written."""
    row = r"^ *(\d+) +(\d+) +[\d,]+ +[\d,]+ +([\d.]+) +([\d.]+) +\d+ s(  written)?$"
    return [
        (int(w), int(v), float(cut), float(refitted), bool(written))
        for w, v, cut, refitted, written in re.findall(row, shown, re.M)
    ]


@pytest.mark.parametrize("name", ["gated", "delta_net"])
def test_the_best_split_of_a_budget_is_written(workplace, capsys, monkeypatch, name):
    from statecut.pruning import prune as module

    calibrations = []
    calibrate_folder = module.calibrate_folder

    def counted(*args, **kwargs):
        calibrations.append(kwargs["values"])
        return calibrate_folder(*args, **kwargs)

    monkeypatch.setattr(module, "calibrate_folder", counted)
    out = workplace / f"{name}-quarter"
    assert prune(workplace, "--state", "0.25", model=name, out=out.name) == 0
    assert calibrations == [True]  # one for all
    shown = capsys.readouterr()
    table = rows(shown.out)
    full = Checkpoint(workplace / name).shape
    assert len(table) == 3
    assert all(w * v * 4 <= full.width * full.value_width for w, v, *_ in table)
    best = min(table, key=lambda row: row[3])
    assert [row for row in table if row[-1]] == [best]
    assert widths(out) == best[:2]
    assert load(out)(torch.arange(9)[None]).logits.isfinite().all()

    splits = ", ".join(f"{width} x {value_width}" for width, value_width, *_ in table)
    assert f"--state 0.25: comparing d_k x d_v of {splits} (multiples of 4: those of" in shown.err
    assert "cut 3 of 3: d_k {}, d_v {}".format(*table[2]) in shown.err
    card = (out / "README.md").read_text()
    assert rows(card.replace("\n    ", "\n")) == table
    assert "bytes (0.25 asked, 0.25 kept) |" in card
    assert " --state 0.25 --target kq " in card
    assert "--refit" in card
    assert ("The norm in front" in card) == (best[1] < full.value_width)
    assert "refitted, on 80 tokens held out" in stored_facts(out)["perplexity"]
    assert not any(key.isdigit() for key in stored_facts(out))  # the table is of this model alone
    assert not list(workplace.glob(".*"))


def test_text_held_out_decides_and_nothing_else(workplace, capsys, monkeypatch):
    """By what is refitted, not by what is cut."""
    values = {(4, 24): (3.0, 9.0), (8, 12): (8.0, 5.0), (12, 8): (4.0, 7.0)}
    texts = []

    def known(checkpoint, ids, **_):
        texts.append(ids)
        shape = checkpoint.shape
        if (shape.width, shape.value_width) not in values:
            return 1.0
        return values[shape.width, shape.value_width][checkpoint.folder.name == "refitted"]

    refitted_on = []

    def observed(student, teacher, ids, **options):
        refitted_on.append(ids)
        return refit(student, teacher, ids, **options)

    monkeypatch.setattr("statecut.evaluation.perplexity.perplexity", known)
    monkeypatch.setattr("statecut.pruning.prune.refit", observed)
    assert prune(workplace, "--state", "0.25", out="decided") == 0
    assert widths(workplace / "decided") == (8, 12)
    assert [row[2:] for row in rows(capsys.readouterr().out)] == [
        (3.0, 9.0, False), (8.0, 5.0, True), (4.0, 7.0, False),
    ]  # fmt: skip
    values[8, 12] = (4.5, 5.0)
    assert prune(workplace, "--state", "0.25", "--force", out="decided") == 0
    caution = "give more --sequences or --text, or --keys 8 --values 12 --no-refit\n"
    assert caution in capsys.readouterr().out
    assert len(texts) == 2 * (1 + 2 * 3)  # the unpruned model's once
    assert all(torch.equal(ids, texts[0]) for ids in texts)
    held_out = {tuple(row) for row in texts[0].tolist()}
    assert not held_out & {tuple(row) for ids in refitted_on for row in ids.tolist()}


def test_what_is_written_is_what_was_compared(workplace, capsys, tmp_path):
    """The perplexity in the table is that of the folder."""
    assert prune(workplace, "--state", "0.5", "--dtype", "float32", out="half") == 0
    best = min(rows(capsys.readouterr().out), key=lambda row: row[3])
    pack_text(
        workplace / "text.jsonl", Checkpoint(workplace / "gated"), tmp_path / "packed",
        slices={"calibration": 9, "held_out": 2}, length=40, seed=0,
    )  # fmt: skip
    ids = torch.from_numpy(PackedTokens(tmp_path / "packed", slice_name="held_out")[:])
    assert perplexity(Checkpoint(workplace / "half"), ids) == pytest.approx(best[3], abs=0.0051)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--keys", "6", "--values", "10"], (6, 10)),
        (["--values", "10"], (16, 10)),
        (["--keys", "6"], (6, 24)),
        (["--keys", "16", "--values", "10"], (16, 10)),
    ],
)
def test_widths_by_hand_are_those_of_the_library(workplace, capsys, tmp_path, options, expected):
    out = workplace / ("hand" + "".join(options))
    assert prune(workplace, *options, "--method", "l1", out=out.name) == 0
    shown = capsys.readouterr().out
    assert widths(out) == expected
    assert ("condition of values" in shown) == (expected[1] < 24)
    assert not rows(shown)
    card = (out / "README.md").read_text()
    assert f" {' '.join(options)} " in card
    assert ("| value channels per head | 10 of 24 |" in card) == (expected[1] < 24)
    assert ("| key channels per head | 6 of 16 |" in card) == (expected[0] < 16)
    assert "| ratio |" not in card
    assert (" --target kq " in card) == (expected[0] < 16)  # else the command would be refused

    checkpoint = Checkpoint(workplace / "gated")
    statistics = ModelStatistics(checkpoint)
    (keys,) = select("l1", statistics, [6])
    (values,) = select("l1", statistics, [10], channels="value")
    slice_model(
        checkpoint,
        keys.change() if expected[0] < 16 else None,
        tmp_path / "expected",
        values=values.value_change() if expected[1] < 24 else None,
        dtype=None,
    )
    written, sliced = (load_file(f / "model.safetensors") for f in (out, tmp_path / "expected"))
    assert written.keys() == sliced.keys()
    assert all(torch.equal(written[name], sliced[name]) for name in written)


def test_widths_by_hand_are_refitted_if_asked(workplace, capsys):
    options = ["--keys", "8", "--values", "12", "--refit"]
    assert prune(workplace, *options, out="hand-refitted") == 0
    shown = capsys.readouterr().out
    assert "perplexity  " in shown
    assert "swaps of values" in shown
    assert not rows(shown)


def test_values_by_a_method_without_text_need_none(workplace, capsys, monkeypatch):
    monkeypatch.setattr("statecut.pruning.prune.pack", None)
    arguments = ["prune", workplace / "gated", workplace / "rand", "--values", "3"]
    assert main([*map(str, arguments), "--method", "rand"]) == 0
    assert widths(workplace / "rand") == (16, 3)


def test_an_engine_that_takes_squares_alone_is_given_one(workplace, capsys):
    options = ["--state", "0.5", "--for", "llama.cpp"]
    assert prune(workplace, *options, model="qwen3_next", out="square") == 0
    shown = capsys.readouterr()
    assert widths(workplace / "square") == (16, 16)
    assert "no choice but d_k x d_v of 16 x 16 (multiples of 16)" in shown.err
    assert re.search("engine +llama.cpp: its CPU path is run", shown.out)
    card = (workplace / "square" / "README.md").read_text()
    assert "bytes (0.5 asked, 0.25 kept) |" in card
    assert "| engine | llama.cpp: " in card
    assert "--for llama.cpp" in card


def test_a_width_that_an_engine_computes_wrong_is_said_of_widths_by_hand(workplace, capsys):
    options = ["--keys", "24", "--values", "16", "--method", "l1"]
    assert prune(workplace, *options, model="qwen3_next", out="caution") == 0
    line = "WARNING: mlx-lm computes d_k 24 wrong on a Mac's GPU, without an error: it takes "
    assert f"{line}multiples of 32, give --for mlx\n" in capsys.readouterr().out


def test_multiples_that_are_asked_for_are_the_only_ones(workplace, capsys):
    assert prune(workplace, "--state", "0.25", "--round-to", "6", out="sixes") == 0
    assert "comparing d_k x d_v of 6 x 12, 16 x 6 (multiples of 6)" in capsys.readouterr().err


# Bad input

BAD = {
    "nothing": ([], "how much to cut is missing: give one of --ratio, --state, or --keys and"),
    "a ratio and a budget": (["--ratio", "0.5", "--state", "0.5"], "--ratio 0.5 --state 0.5: give"),
    "a budget and widths": (["--state", "0.5", "--keys", "8"], "--state 0.5 --keys 8: give one of"),
    "a ratio and widths": (["--ratio", "0.5", "--values", "8"], "--ratio 0.5 --values 8: give one"),
    "all of the state": (["--state", "1"], "--state 1: must lie in (0, 1), the share of the"),
    "none of it": (["--state", "0"], "--state 0: must lie in (0, 1)"),
    "a share that is no number": (["--state", "nan"], "--state nan: must lie in (0, 1)"),
    "a budget without a refit": (["--state", "0.5", "--no-refit"], "--no-refit: --state compares"),
    "a budget below one channel": (
        ["--state", "0.001"],
        "--state 0.001: no cut of d_k 16 and d_v 24 of {model} leaves so little of the state; "
        "the smallest is 1 x 1: give --state 0.0027 or more",
    ),
    "a budget and large multiples": (
        ["--state", "0.25", "--round-to", "16"],
        "in multiples of 16 leaves so little of the state; the smallest is 16 x 16: give --state "
        "0.6667 or more",
    ),
    "a method that chooses no values": (
        ["--state", "0.5", "--method", "grad"],
        "method grad chooses no value channels; drrqr",
    ),
    "values by PCA": (
        ["--values", "4", "--method", "pca_proper"],
        "method pca_proper chooses no value channels",
    ),
    "values by normalised activations": (
        ["--state", "0.5", "--activations", "normalised"],
        "activations normalised: values have no L2 norm; take raw",
    ),
    "more keys than there are": (["--keys", "17"], "a head of {model} has 16 key"),
    "more values than there are": (["--values", "25"], "24 value channels; give fewer of"),
    "no values": (["--values", "0"], "--values 0: must be 1 or more"),
    "all channels": (["--keys", "16", "--values", "24"], "--keys 16 --values 24: a head of"),
    "widths that are rounded": (["--keys", "5", "--round-to", "4"], "--keys 5 is not rounded"),
    "a target without keys": (
        ["--values", "8", "--target", "k"],
        "--target k: it says what key channels are judged by, and --values 8 cuts values alone",
    ),
    "a target and all keys": (
        ["--keys", "16", "--values", "8", "--target", "kq"],
        "--keys 16 --values 8 cuts values alone",
    ),
    "an engine without this model": (
        ["--state", "0.5", "--for", "vllm"],
        "nothing is known of gated_deltanet models in vLLM",
    ),
}  # fmt: skip


@pytest.fixture
def idle(monkeypatch):
    """No work is done."""
    for name in ("pack", "calibrate_folder", "select", "slice_model"):
        monkeypatch.setattr(f"statecut.pruning.prune.{name}", None)


@pytest.mark.parametrize("case", sorted(BAD))
@pytest.mark.usefixtures("idle")
def test_bad_input_is_refused_before_any_work(workplace, capsys, case):
    options, message = BAD[case]
    assert prune(workplace, *options, out="bad") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("statecut: ")
    assert message.format(model=workplace / "gated") in line
    assert not (workplace / "bad").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--state", "0.1", "--for", "llama.cpp"],
            "that llama.cpp takes (only d_k = d_v of 16, 32, 64, 128) leaves so little of the "
            "state; the smallest is 16 x 16: give --state 0.25 or more",
        ),
        (
            ["--keys", "16", "--values", "24", "--for", "llama.cpp"],
            "--for llama.cpp: llama.cpp does not take d_k 16 with d_v 24; it takes only d_k = d_v",
        ),
        (["--keys", "24", "--for", "mlx"], "mlx-lm does not take d_k 24 with d_v 32; it takes mul"),
    ],
)
@pytest.mark.usefixtures("idle")
def test_what_an_engine_cannot_take_is_refused_before_any_work(workplace, capsys, options, message):
    assert prune(workplace, *options, model="qwen3_next", out="bad") == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("idle")
def test_keys_that_no_kernel_takes_are_refused(tmp_path, capsys):
    save(create({**SMALL["gated"], "head_dim": 320, "expand_v": 0.05}, seed=1), tmp_path / "model")
    arguments = ["prune", tmp_path / "model", tmp_path / "out", "--keys", "300"]
    assert main([*map(str, arguments), "--method", "l1"]) == 2
    assert "--keys 300: the kernels take no more than 256" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--state", "0.5"], ["--values", "8"]])
@pytest.mark.usefixtures("idle")
def test_a_model_whose_values_cannot_be_cut_is_refused(workplace, tmp_path, capsys, options):
    shutil.copytree(workplace / "gated", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    bias = {"model.layers.1.attn.o_norm.bias": torch.zeros(24)}
    save_file({**load_file(weights), **bias}, weights, metadata={"format": "pt"})
    arguments = ["prune", tmp_path / "model", tmp_path / "out", *options]
    assert main([*map(str, arguments)]) == 2
    assert "o_norm.bias: values are cut only where the norm of the outputs has no bias" in (
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("idle")
def test_a_comparison_needs_room_for_three_models(workplace, capsys, monkeypatch):
    usage = shutil.disk_usage(workplace)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    sizes = []
    for options in (["--keys", "4", "--refit"], ["--state", "0.25"]):
        assert prune(workplace, *options, out="bad") == 2
        (size,) = re.findall(r"bad needs ([\d,]+) bytes", capsys.readouterr().err)
        sizes.append(int(size.replace(",", "")))
    assert sizes[1] > sizes[0]
    assert sizes[1] % 3 == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_killed_comparison_leaves_what_was_there_and_nothing_else(
    workplace, capsys, monkeypatch, number
):
    assert prune(workplace, "--ratio", "0.5", "--method", "l1", "--force", out="before") == 0
    before = (workplace / "before" / "model.safetensors").read_bytes()
    calls = []

    def killed(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return refit(*args, **kwargs)

    monkeypatch.setattr("statecut.pruning.prune.refit", killed)
    assert prune(workplace, "--state", "0.25", "--force", out="before") == 130
    assert capsys.readouterr().err.endswith("statecut: interrupted\n")
    assert (workplace / "before" / "model.safetensors").read_bytes() == before
    assert not list(workplace.glob(".*"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def warnings(*perplexities):
    """Of cuts with these perplexities before, cut and refitted, that were compared."""
    request = SimpleNamespace(state=0.5, ratio=None, engine="mlx")
    shape = MixerShape((0,), 1, 16, 1, 16)
    candidates = [
        Candidate(None, replace(shape, width=number), 0, None, 0.0, None,
                  HeldOut(dict(zip(("before", "cut", "refitted"), values, strict=True)), 40))
        for number, values in enumerate(perplexities, 1)
    ]  # fmt: skip
    return [*Outcome(request, None, SimpleNamespace(tensors={}), candidates).warnings()]


def test_cuts_that_are_nearly_as_good_are_named():
    (line,) = warnings((8, 60, 50.0), (8, 60, 50.9), (8, 60, 51.1))
    assert line.startswith("within 2% of the best: 2 x 16. Other text")
    assert warnings((8, 60, 50.0), (8, 60, 51.1)) == []


def test_a_refit_that_does_not_help_is_said():
    assert warnings((8, 12, 9)) == []
    assert warnings((8, 12, 12))[0].endswith("--text, or --keys 1 --values 16 --no-refit")
    assert warnings((8, 8, 9)) == [
        "the cut did no damage to the text held out, and the refit made it worse"
    ]


def test_a_finer_grid_can_be_asked_for(workplace, capsys):
    assert prune(workplace, "--state", "0.25", "--round-to", "1", out="ones") == 0
    shown = capsys.readouterr()
    assert "(multiples of 1)" in shown.err
    assert "0.25 asked, 0.25 kept" in shown.out
    assert " --round-to 1" in (workplace / "ones" / "README.md").read_text()
