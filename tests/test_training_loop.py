"""The loop: its schedule, its bad steps, and what it refuses before it starts."""

import csv
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL
from torch import nn
from training_runs import LENGTH, packed, recipe

from reproduction.pretraining.pretrain import pretrain
from statecut.errors import InputError
from statecut.models.checkpoint import create, load
from statecut.recovery.checkpoints import CURVE, Checkpoints, Output
from statecut.recovery.loop import PATIENCE, Losses, learning_rate, train


@pytest.fixture
def data(tmp_path):
    return packed(tmp_path / "tokens")


def trained(tmp_path, data, settings, *, out="out", model="delta_net"):
    output = Output(tmp_path / out, checkpoints=tmp_path / "run")
    pretrain(create(SMALL[model], seed=1), data, settings, output)
    return tmp_path / out


def curve(folder):
    with open(folder / CURVE) as file:
        return list(csv.DictReader(file))


@given(warmup=st.integers(0, 30), rest=st.integers(1, 60), floor=st.floats(0, 1))
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(warmup, rest, floor):
    settings = recipe(warmup=warmup, steps=warmup + rest, floor=floor).settings()
    rates = [learning_rate(step, settings) for step in range(1, settings.steps + 1)]
    peak = settings.learning_rate
    assert rates[:warmup] == [pytest.approx(peak * i / warmup) for i in range(1, warmup + 1)]
    assert [peak, *rates[warmup:]] == sorted([peak, *rates[warmup:]], reverse=True)
    assert rates[-1] == pytest.approx(peak * floor)
    if rest % 2 == 0:
        assert rates[warmup + rest // 2 - 1] == pytest.approx(peak * (1 + floor) / 2)


@pytest.mark.parametrize("model", ["delta_net_tied", "gated"])
def test_a_model_learns_and_is_an_ordinary_one(tmp_path, data, model):
    folder = trained(tmp_path, data, recipe(), model=model)
    rows = curve(folder)
    assert [int(row["step"]) for row in rows] == list(range(1, 25))
    assert int(rows[-1]["tokens"]) == 24 * 2 * LENGTH
    assert float(rows[-1]["loss"]) < 0.9 * float(rows[0]["loss"])
    assert {row["kd"] for row in rows} == {""}
    ids = torch.from_numpy(data[:])
    with torch.no_grad():
        assert load(folder)(ids, labels=ids).loss.item() < float(rows[0]["loss"])


def test_several_gpus_are_as_many_batches_one_after_the_other(tmp_path, data):
    at_once = load(trained(tmp_path, data, recipe(steps=6, batch=4), out="at_once"))
    in_turn = load(trained(tmp_path, data, recipe(steps=6, batch=2, world_size=2), out="in_turn"))
    for ours, theirs in zip(in_turn.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def run(tmp_path, data, values, steps=24, save_seconds=600):
    """A run of a loss that takes these values, one each step."""
    model, values = Scale(), iter(values)
    checkpoints = Checkpoints(tmp_path / "run", {})
    history = []

    def loss(ids):
        history.append(model.weight.detach().clone())
        total = model.weight.sum() * next(values)
        return Losses(total, total)

    with checkpoints:
        settings = recipe(steps=steps).settings()
        train(model, loss, data, settings, checkpoints, work="test", save_seconds=save_seconds)
    return history, checkpoints


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_shown(tmp_path, data, bad):
    history, checkpoints = run(tmp_path, data, [1.0, bad, 1.0, 1.0], steps=4)
    assert not torch.equal(history[0], history[1])
    assert torch.equal(history[1], history[2])
    assert not torch.equal(history[2], history[3])
    assert [row["loss"] for row in curve(checkpoints.folder)][1] == str(bad)


def test_bad_steps_in_a_row_end_the_run_and_leave_good_weights(tmp_path, data):
    values = [1.0, 1.0, 1.0, *[math.nan] * (PATIENCE - 1), 1.0, *[math.nan] * PATIENCE]
    with pytest.raises(InputError, match=f"{PATIENCE} steps in a row were not finite"):
        run(tmp_path, data, values, save_seconds=0)
    saved = Checkpoints(tmp_path / "run", {}).last()
    assert saved["run.steps"].tolist() == [len(values) - 1, PATIENCE - 1]
    assert saved["weight.weight"].isfinite().all()
    # Started again, it is as close to its end as it was.
    with pytest.raises(InputError, match=f"the last of them step {len(values)} "):
        run(tmp_path, data, [math.nan])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 25}, "text/training: 25 steps need 50 sequences, there are 48"),
        ({"steps": 49, "epochs": 2}, "need 98 sequences, there are 96 in 2 epochs"),
        ({"steps": 13, "world_size": 2}, "13 steps need 52 sequences"),
    ],
)
def test_too_little_text_is_refused(tmp_path, data, changes, message):
    with pytest.raises(InputError, match=message):
        trained(tmp_path, data, recipe(**changes))
    other = packed(tmp_path / "large", vocabulary=98)
    with pytest.raises(InputError, match="packed with 98 tokens, the model's vocab_size is 97"):
        trained(tmp_path, other, recipe())
    assert not (tmp_path / "run").exists()
