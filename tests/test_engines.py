"""Widths that engines take: the table, and `statecut prune --for`."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL

import statecut
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
    width = data.draw(st.integers(1, full - 1))
    taken = [w for w in range(width, full) if engine.takes(w, value_width) and w % multiple == 0]
    try:
        rounded = engine.round_up(width, shape(full, value_width), multiple)
    except InputError:
        assert not taken
    else:
        assert rounded == taken[0]
        assert width <= rounded < full


@given(engine=st.sampled_from([*ENGINES.values()]), full=st.integers(2, 300), data=st.data())
def test_the_ratio_that_an_error_names_works(engine, full, data):
    from statecut.arguments import width as width_of

    width = data.draw(st.integers(1, full - 1))
    try:
        engine.round_up(width, shape(full))
    except InputError as error:
        if "--ratio" in str(error):
            ratio, kept = str(error).split("--ratio ")[1].split(" keeps ")
            assert width_of(full, ratio) == int(kept) == engine.round_up(int(kept), shape(full))


def test_widths_of_the_engines():
    """96, 64 and 32 of 128 serve everywhere that a key-only cut serves at all."""
    for width in (96, 64, 32):
        takers = {name for name, engine in ENGINES.items() if engine.takes(width, 128)}
        assert takers == {*ENGINES} - {"llama.cpp"}
    assert ENGINES["llama.cpp"].takes(128, 128)
    assert not ENGINES["mlx"].takes(80, 128)
    assert ENGINES["mlx"].round_up(65, shape(128)) == 96
    assert ENGINES["vllm"].round_up(65, shape(128)) == 65
    assert not ENGINES["vllm"].takes(257, 128)


def test_a_cut_that_an_engine_cannot_take_is_an_error_with_a_way_out():
    with pytest.raises(InputError) as error:
        ENGINES["llama.cpp"].round_up(64, shape(128))
    assert str(error.value) == (
        "--for llama.cpp: llama.cpp takes no d_k from 64 to 127 (the model has d_k 128, d_v 128); "
        "it takes only d_k = d_v of 16, 32, 64, 128: " + NO_KEYS_ALONE
    )
    assert ENGINES["llama.cpp"].round_up(64, shape(256, 128)) == 128  # down to a square
    with pytest.raises(InputError, match=r"from 33 to 47 .* multiples of 32: --ratio 0.333 keeps"):
        ENGINES["mlx"].round_up(33, shape(48))
    with pytest.raises(
        InputError, match=r"no d_k from 8 to 15 that is a multiple of 16 .*: give a"
    ):
        ENGINES["transformers"].round_up(8, shape(16), 16)


def test_settings_are_named_where_they_are_needed():
    vllm = ENGINES["vllm"]
    assert vllm.advice(shape(64)) == (
        "vLLM: start it with `--gdn-prefill-backend triton`; read in its source, not run "
        "(August 2026)"
    )
    assert vllm.advice(shape(128)) == "vLLM: read in its source, not run (August 2026)"
    # With other values nothing is known of the kernel that takes 128 alone.
    assert vllm.advice(shape(128, value_width=64)) == (
        "vLLM: start it with `--gdn-prefill-backend triton`; read in its source, not run, for d_v "
        "128; nothing is known of d_v 64 (August 2026)"
    )
    assert ", for d_v" not in ENGINES["llama.cpp"].advice(shape(64, value_width=64))
    assert "`TLLM_USE_FLASHINFER_GDN_PREFILL=0`" in ENGINES["tensorrt-llm"].advice(shape(96))
    assert "start it" not in ENGINES["sglang"].advice(shape(96))


def test_every_entry_says_where_it_is_from_and_names_models_that_statecut_has():
    for name, engine in ENGINES.items():
        assert name == engine.name
        assert engine.source
        assert engine.date
        assert READ in engine.evidence or "run in Statecut's tests" in engine.evidence
        assert {*engine.models} <= {*ARCHITECTURES}


def test_a_model_of_which_nothing_is_known_is_refused():
    with pytest.raises(InputError) as error:
        ENGINES["vllm"].check_model("gated_deltanet")
    assert str(error.value) == (
        "engine vllm: nothing is known of gated_deltanet models in vLLM, only of qwen3_next, "
        "qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text; leave it out"
    )


def test_the_page_has_the_table_as_it_is():
    page = (ROOT / "docs" / "engines.md").read_text()
    assert table() in page, (
        "docs/engines.md: put what `python -m statecut.serving.engines` prints there"
    )


def test_widths_computed_wrong_are_named_for_models_that_the_engine_takes():
    (line,) = computed_wrong("qwen3_next", shape(40), shape(128))
    assert line == (
        "WARNING: mlx-lm computes d_k 40 wrong on a Mac's GPU, without an error: it takes "
        "multiples of 32, `statecut prune --for mlx` rounds up to 64"
    )
    assert not [*computed_wrong("qwen3_next", shape(64), shape(128))]
    assert not [*computed_wrong("delta_net", shape(40), shape(128))]
    (line,) = computed_wrong("qwen3_next", shape(40, 64), shape(128), by_ratio=False)
    assert line.endswith("it takes multiples of 32, give --for mlx")


@pytest.mark.parametrize(("full", "way_out"), [(48, "--ratio 0.333 keeps 32"), (32, NO_KEYS_ALONE)])
def test_a_warning_names_no_rounding_that_is_refused(full, way_out):
    (line,) = computed_wrong("qwen3_next", shape(full - 1), shape(full))
    assert line.endswith(f"it takes multiples of 32, {way_out}")


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
    line = "--for mlx: 32 channels per head, as mlx-lm takes multiples of 32"
    assert caplog.text.count(line) == 1
    assert "mlx-lm: its CPU path is run in Statecut's tests" in pruned.record.facts()["engine"]
    assert pruned.record.facts()["key channels per head"] == (
        "32 of 48 (24 asked, rounded up for mlx)"
    )
    assert Checkpoint(tmp_path / "mac").shape.width == 32
    prune(model, tmp_path / "served", ratio=0.5, engine="vllm")
    assert "--for vllm" not in caplog.text  # it takes the multiple of 16
    card = (tmp_path / "served" / "README.md").read_text()
    advice = "vLLM: start it with `--gdn-prefill-backend triton`; read in its source, not run"
    assert f"- engine: {advice}, for d_v 128; nothing is known of d_v 48" in card
    assert " --for vllm" in card
    assert Checkpoint(tmp_path / "served").shape.width == 32


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
def test_what_an_engine_cannot_take_is_refused_without_torch(
    model, tmp_path, engine, ratio, message
):
    with pytest.raises(InputError, match=re.escape(message)):
        Request(model, tmp_path / "out", ratio=ratio, engine=engine).plan()
