"""Widths that engines take: the table, and `statecut prune --for`."""

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL

import statecut
from statecut.arguments import width as width_of
from statecut.errors import InputError
from statecut.models.architectures import ARCHITECTURES
from statecut.models.checkpoint import Checkpoint, create, save
from statecut.models.shapes import MixerShape
from statecut.pruning.request import Request
from statecut.serving.engines import ENGINES, H200, READ, TESTS, TEXT_ONLY, table

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
            ratio, kept = str(error).split("--ratio ")[1].split(";")[0].split(" keeps ")
            assert width_of(full, ratio) == int(kept) == engine.round_up(int(kept), whole)


def test_every_entry_says_where_it_is_from_and_names_models_that_statecut_has():
    for name, engine in ENGINES.items():
        assert name == engine.name
        assert any(words in engine.evidence for words in (READ, TESTS, H200))
        runs = engine.models.values()
        assert all(engine.takes(*widths) for ran in runs for widths in ran or ())
        assert (engine.evidence == READ) == ({*runs} == {()})
        assert {*engine.models, *engine.lacks} <= {*ARCHITECTURES}
    with pytest.raises(
        InputError, match=r"no kimi_linear .* in vLLM; .*: transformers, vllm.state"
    ):
        ENGINES["vllm"].check_model("kimi_linear")
    page = (ROOT / "docs/reference/engines.md").read_text()
    assert table() in page, "put there what `python -m statecut.serving.engines` prints"


@pytest.mark.parametrize("name", [n for n, e in ENGINES.items() if e.evidence == H200])
def test_what_was_run_on_a_gpu_is_what_benchmarks_have_of_it(name):
    engine, right = ENGINES[name], {}
    for row in json.loads((ROOT / "benchmarks/h200/serving.json").read_text()):
        if row["installed"].replace(" and ", "+") == name and row["outcome"] == "right":
            right.setdefault(row["family"], set()).add(tuple(map(int, row["shape"].split("x"))))
    if name == "vllm":
        del right["kimi_linear"]  # its cuts are computed wrong
    assert {model: {*ran} for model, ran in engine.models.items() if ran} == right


def test_mlx_knows_the_models_that_are_said_to_run_there():
    def known(name):
        return importlib.util.find_spec(f"mlx_lm.models.{name}") is not None

    models = ENGINES["mlx"].models
    assert [*filter(known, models)] == [*models]
    assert not any(map(known, TEXT_ONLY))


def test_what_is_run_by_hand_in_llama_cpp_imports_what_is_there():
    runpy.run_path(str(ROOT / "tests/llama/check_llama.py"))


def test_vllm_starts_where_keys_and_values_round_up_alike_and_anywhere_with_the_plugin():
    stock, plugin = ENGINES["vllm"], ENGINES["vllm+statecut"]
    assert [*map(stock.takes, (65, 64, 128, 20, 33), (128, 128, 64, 128, 64))] == [
        True, False, False, False, True
    ]  # fmt: skip
    assert plugin.takes(64, 128)
    assert [plugin.ran_with("qwen3_5", shape(width)) for width in (64, 48)] == [True, False]
    squares = [(model, shape(32, 32)) for model in ("qwen3_5", "kimi_linear")]
    assert [plugin.ran_with(*square) for square in squares] == [False, True]
    with pytest.raises(InputError, match=r"; or --for vllm\+statecut, with Statecut installed"):
        stock.round_up(250, shape(256))


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
    pruned = prune(model, tmp_path / "stock", ratio=0.5, round_to=1, engine="vllm")
    assert caplog.text.count("--for vllm: 33 channels per head, as vLLM takes d_k and") == 1
    facts = pruned.record.facts()
    assert facts["key channels per head"] == "33 of 48 (24 asked, rounded up for vllm)"
    advice = "vLLM: start it with `vllm serve stock --gdn-prefill-backend triton`; "
    advice += "expected to run, not run (vLLM 0"
    assert facts["engine"].startswith(advice)
    prune(model, tmp_path / "served", ratio=0.5, engine="vllm+statecut")
    assert "--for vllm+statecut:" not in caplog.text  # it takes the multiple of 16
    card = (tmp_path / "served" / "README.md").read_text()
    assert "- engine: vLLM with Statecut installed beside it: start it with `vllm serve ser" in card
    assert " --for vllm+statecut" in card
    assert Checkpoint(tmp_path / "served").shape.width == 32


@pytest.mark.parametrize(
    ("engine", "ratio", "message"),
    [
        ("llama.cpp", 0.5, "--for llama.cpp: llama.cpp takes no d_k from 24 to 47"),
        ("sglang", 0.5, "--for sglang: SGLang takes no d_k from 24 to 47"),
        ("mlxx", 0.5, "engine mlxx: there is none of this name; did you mean 'mlx'?"),
    ],
)
def test_what_an_engine_cannot_take_is_refused(model, tmp_path, engine, ratio, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Request(model, tmp_path / "out", ratio=ratio, engine=engine).plan()
