"""Widths that engines take: the table, and `statecut prune --for`."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL

import statecut
from statecut.arguments import width as width_of
from statecut.errors import InputError
from statecut.models import create, save
from statecut.models.architectures import ARCHITECTURES
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import MixerShape
from statecut.pruning.request import Request
from statecut.serving.engines import ENGINES, NO_KEYS_ALONE, READ, computed_wrong, table

ROOT = Path(__file__).parents[1]


def shape(width, value_width=128):
    return MixerShape((0,), heads=1, width=width, value_heads=1, value_width=value_width)


@given(
    engine=st.sampled_from([*ENGINES.values()]),
    full=st.integers(2, 300),
    value_width=st.sampled_from([16, 64, 100, 128, 256]),
    multiple=st.sampled_from([1, 8, 16, 48]),
    data=st.data(),
)
def test_a_width_is_rounded_up_to_the_narrowest_that_is_taken(
    engine, full, value_width, multiple, data
):
    """Where there is none, the ratio that the error names works."""
    width, whole = data.draw(st.integers(1, full - 1)), shape(full, value_width)
    taken = [w for w in range(width, full) if engine.takes(w, value_width) and w % multiple == 0]
    try:
        assert engine.round_up(width, whole, multiple) == taken[0]
    except InputError as error:
        assert not taken
        if multiple == 1 and "--ratio" in str(error):
            ratio, kept = str(error).split("--ratio ")[1].split(" keeps ")
            assert width_of(full, ratio) == int(kept) == engine.round_up(int(kept), whole)


def test_every_entry_says_where_it_is_from_and_names_models_that_statecut_has():
    for name, engine in ENGINES.items():
        assert name == engine.name
        assert engine.source
        assert engine.date
        assert READ in engine.evidence or "run in Statecut's tests" in engine.evidence
        assert {*engine.models} <= {*ARCHITECTURES}
    with pytest.raises(InputError, match="nothing is known of gated_deltanet models in vLLM"):
        ENGINES["vllm"].check_model("gated_deltanet")
    page = (ROOT / "docs" / "engines.md").read_text()
    assert table() in page, "put there what `python -m statecut.serving.engines` prints"


@pytest.mark.parametrize(
    ("width", "full", "way_out"),
    [
        (40, 128, "`statecut prune --for mlx` rounds up to 64"),
        (47, 48, "--ratio 0.333 keeps 32"),
        (31, 32, NO_KEYS_ALONE),
    ],
)
def test_widths_computed_wrong_are_named_with_a_way_that_is_not_refused(width, full, way_out):
    (line,) = computed_wrong("qwen3_next", shape(width), shape(full))
    assert line.startswith(f"WARNING: mlx-lm computes d_k {width} wrong on a Mac's GPU")
    assert line.endswith(f"it takes multiples of 32, {way_out}")
    assert not [*computed_wrong("qwen3_next", shape(64), shape(128))]
    assert not [*computed_wrong("delta_net", shape(width), shape(full))]


# statecut prune --for


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With d_k = d_v = 48."""
    folder = tmp_path_factory.mktemp("engines") / "model"
    config = {**SMALL["qwen3_next"], "linear_key_head_dim": 48, "linear_value_head_dim": 48}
    save(create(config, seed=1), folder)
    return folder


def prune(model, out, **options):
    return statecut.prune(model, out, method="l1", refit=False, **options)


def test_prune_for_an_engine_rounds_up_and_says_what_to_do(model, tmp_path, caplog):
    caplog.set_level("INFO")
    pruned = prune(model, tmp_path / "mac", ratio=0.5, round_to=1, engine="mlx")
    assert caplog.text.count("--for mlx: 32 channels per head, as mlx-lm takes multiples of") == 1
    facts = pruned.record.facts()
    assert "mlx-lm: its CPU path is run in Statecut's tests" in facts["engine"]
    assert facts["key channels per head"] == "32 of 48 (24 asked, rounded up for mlx)"
    prune(model, tmp_path / "served", ratio=0.5, engine="vllm")
    assert "--for vllm" not in caplog.text  # it takes the multiple of 16
    card = (tmp_path / "served" / "README.md").read_text()
    assert "- engine: vLLM: start it with `--gdn-prefill-backend triton`; read in its" in card
    assert " --for vllm" in card
    assert {Checkpoint(tmp_path / out).shape.width for out in ("mac", "served")} == {32}


@pytest.mark.parametrize(
    ("cut", "way_out"),
    [
        ({"ratio": 0.5, "round_to": 1}, "`statecut prune --for mlx` rounds up to 32"),
        ({"keys": 24, "values": 16}, "give --for mlx"),
    ],
)
def test_a_width_that_some_engine_computes_wrong_is_one_line(model, tmp_path, cut, way_out):
    (warning,) = prune(model, tmp_path / "out", **cut).warnings
    assert warning.startswith("mlx-lm computes d_k 24 wrong on a Mac's GPU")
    assert warning.endswith(f"it takes multiples of 32, {way_out}")
    assert f"- warning: {warning}\n" in (tmp_path / "out" / "README.md").read_text()
    assert prune(model, tmp_path / "served", engine="sglang", **cut).warnings == ()


@pytest.mark.parametrize(
    ("engine", "ratio", "message"),
    [
        ("llama.cpp", 0.5, "--for llama.cpp: llama.cpp takes no d_k from 24 to 47"),
        ("mlx", 0.2, "--for mlx: mlx-lm takes no d_k from 38 to 47"),
        ("mlxx", 0.5, "engine mlxx: there is none of this name; did you mean 'mlx'?"),
    ],
)
def test_what_an_engine_cannot_take_is_refused(model, tmp_path, engine, ratio, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Request(model, tmp_path / "out", ratio=ratio, engine=engine).plan()
