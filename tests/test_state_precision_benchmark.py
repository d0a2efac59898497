"""The benchmark of states in fewer bits, on tiny models."""

import json
import sys
from pathlib import Path

import pytest
import torch
from small_models import SMALL
from training_runs import packed

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import state_precision
from state_precision import TYPES, delta_rule_held_in, rounded

from statecut.files import read_json, write_json
from statecut.models import create, save
from statecut.models.delta_rule import l2_normalised, recurrent_delta_rule


def rule_inputs(channelwise=False, d_k=6, d_v=5):
    torch.manual_seed(0)
    q, k = (l2_normalised(torch.randn(2, 17, 3, d_k)) for _ in range(2))
    v, beta = torch.randn(2, 17, 3, d_v), torch.rand(2, 17, 3)
    g = -torch.rand(2, 17, 3, d_k) if channelwise else -torch.rand(2, 17, 3)
    return q, k, v, beta, g, d_k**-0.5, torch.randn(2, 3, d_k, d_v)


@pytest.mark.parametrize("channelwise", [False, True])
def test_without_rounding_it_is_the_rule(channelwise):
    inputs = rule_inputs(channelwise)
    for ours, theirs in zip(
        delta_rule_held_in(torch.float32)(*inputs), recurrent_delta_rule(*inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_with_rounding_the_state_is_what_the_type_holds_and_the_output_is_not():
    o, state = delta_rule_held_in(torch.bfloat16)(*rule_inputs())
    assert torch.equal(state, state.bfloat16().float())
    assert not torch.equal(o, o.bfloat16().float())
    exact, _ = recurrent_delta_rule(*rule_inputs())
    assert 0 < (o - exact).abs().max() < 0.05


def test_fewer_bits_are_further_from_the_rule():
    exact, _ = recurrent_delta_rule(*rule_inputs())
    errors = [(delta_rule_held_in(t)(*rule_inputs())[0] - exact).norm() for t in TYPES.values()]
    assert errors == sorted(errors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_in_eight_bits_each_head_has_a_scale_and_nothing_is_rounded_twice(dtype, size):
    state = size * torch.randn(2, 3, 8, 8) * torch.tensor([1.0, 100.0, 0.0])[:, None, None]
    held = rounded(state, dtype)
    largest = state.abs().amax((-2, -1), keepdim=True)
    step = torch.finfo(dtype).eps / 2  # the largest relative error of the largest numbers
    assert ((held - state).abs() <= step * largest).all()
    assert torch.equal(rounded(held, dtype), held)


@pytest.mark.parametrize("small", ["delta_net", "gated", "gated_value_heads", "shared_head"])
def test_the_emulation_in_float32_has_the_perplexity_of_the_model(small, tmp_path):
    save(create(SMALL[small], seed=0), tmp_path / "model")
    ids = torch.randint(97, (3, 70), generator=torch.Generator().manual_seed(0))
    own, emulated, coarse = (
        state_precision.measure(tmp_path / "model", state, ids, "cpu")
        for state in (state_precision.OWN_KERNELS, "float32", "float8_e5m2")
    )
    assert emulated["perplexity"] == pytest.approx(own["perplexity"], rel=1e-5)
    assert coarse["perplexity"] != pytest.approx(own["perplexity"], rel=1e-5)
    assert own["bytes"] == emulated["bytes"] == 4 * coarse["bytes"]


def test_from_a_model_to_the_table(tmp_path, monkeypatch, capsys):
    save(create(SMALL["delta_net"], seed=0), tmp_path / "model")
    packed(tmp_path / "text")
    manifest = tmp_path / "text" / "manifest.json"
    write_json(manifest, {**read_json(manifest), "slices": {
        "calibration": [0, 24], "held_out": [24, 32],
    }})  # fmt: skip
    out = tmp_path / "rows.jsonl"
    arguments = [
        "--models", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--out", str(out),
        "--sequences", "16", "--methods", "drrqr", "--ratios", "0.5",
        "--states", "float32", "float8_e4m3",
    ]  # fmt: skip

    def run(*more):
        monkeypatch.setattr(sys, "argv", ["state_precision.py", *more])
        state_precision.main()
        return capsys.readouterr().out

    run(*arguments)
    rows = [json.loads(line) for line in out.open()]
    shapes = [(row["stage"], row["state"], row["bytes"]) for row in rows]
    assert shapes == [
        ("whole", "own kernels", 4096), ("whole", "float32", 4096), ("whole", "float8_e4m3", 1024),
        ("sliced", "float32", 2048), ("refitted", "float32", 2048),
        ("refitted", "float8_e4m3", 512),
    ]  # fmt: skip
    # What was lost is computed again, the same, and nothing else.
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert len(run(*arguments).splitlines()) == 1
    again = [json.loads(line) for line in out.open()]
    assert again[-1]["perplexity"] == rows[-1]["perplexity"]
    header, _, whole, sliced, refitted = run("--table", str(out)).splitlines()
    assert header == "| model | key channels | own kernels | float32 | float8_e4m3 |"
    assert "(100.0%)" in whole
    assert "| 50.0%, drrqr, sliced |  | " in sliced
    assert refitted.endswith("(12.5%) |")
