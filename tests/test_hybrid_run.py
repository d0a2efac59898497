"""A hybrid through every stage of a run, as the built-in trainer makes one: softmax attention
between two layers with a delta rule."""

import math
import re

import pytest
import torch
from evaluation_runs import demo_data
from training_runs import packed, recipe, recovery

from reproduction.analysis.filters import filters
from reproduction.analysis.states import analyse_rank
from reproduction.config import parse_config
from reproduction.pretraining.pretrain import pretrain
from statecut.models.checkpoint import Checkpoint, create, load
from statecut.pruning.calibration import Calibration, calibrate_folder, sampled_sequences
from statecut.pruning.refit import refit, write_refitted
from statecut.pruning.select import select
from statecut.pruning.slicing import slice_model
from statecut.pruning.statistics import ModelStatistics
from statecut.recovery.checkpoints import Output
from statecut.recovery.training import recover

DELTA, SOFTMAX = (0, 2), 1
WIDTH, KEPT = 16, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("text") / "tokens")


@pytest.fixture(scope="module")
def models(data, tmp_path_factory):
    """Folders: trained, sliced, refitted, and either of the two recovered."""
    root = tmp_path_factory.mktemp("models")
    config = demo_data()
    sizes = {"vocab_size": 97, "hidden_size": 32, "head_dim": WIDTH, "num_v_heads": 4}
    config["models"]["hybrid"] |= {**sizes, "tokenizer": "small"}
    config["tokenizers"]["small"] = {**config["tokenizers"]["demo"], "vocab_size": 97}
    model = parse_config(config, "test.yaml").models["hybrid"]
    new = create(model.fla_config(), seed=0)
    assert sum(p.numel() for p in new.parameters()) == model.parameters
    pretrain(new, data, recipe(), Output(root / "trained", root / "running"))
    trained = Checkpoint(root / "trained")
    calibrate_folder(
        trained.folder, data, name="text/training", sequences=16, rows=200, seed=0, device="cpu"
    ).save(root / "calibration")
    statistics = ModelStatistics(trained, Calibration.load(root / "calibration"))
    (selection,) = select("drrqr", statistics, [KEPT], target="kq", seed=0)
    slice_model(trained, selection.change(), root / "sliced", dtype=None)
    sliced = Checkpoint(root / "sliced")
    ids = sampled_sequences(data, 32, 0)
    write_refitted(sliced, refit(sliced, trained, ids, device="cpu"), root / "refitted")
    for start in ("sliced", "refitted"):
        out = Output(root / f"{start}_recovered", root / "running")
        recover(root / start, trained.folder, data, recovery(), out)
    names = ("trained", "sliced", "refitted", "sliced_recovered", "refitted_recovered")
    return {name: Checkpoint(root / name) for name in names}


def loss(checkpoint, data):
    ids = torch.from_numpy(data[:])
    with torch.no_grad():
        return load(checkpoint.folder)(ids, labels=ids).loss.item()


def test_training_lowers_the_loss_and_each_repair_what_the_cut_added(models, data):
    losses = {name: loss(model, data) for name, model in models.items()}
    assert losses["trained"] < 4.0 < math.log(97)
    assert losses["sliced"] > losses["refitted"]
    assert losses["sliced"] > losses["sliced_recovered"]
    assert losses["refitted"] > losses["refitted_recovered"]


def test_every_stage_keeps_the_layers_and_cuts_those_with_a_delta_rule_alone(models):
    trained = models["trained"]
    assert trained.shape.layers == DELTA
    softmax = f"model.layers.{SOFTMAX}.self_attn."
    attention = [name for name in trained.files if name.startswith(softmax)]
    assert len(attention) == 6
    for name, model in models.items():
        assert set(model.files) == set(trained.files)
        assert model.shape.width == (WIDTH if name == "trained" else KEPT)
        for tensor in attention:
            assert torch.equal(model.tensor(tensor), trained.tensor(tensor)), (name, tensor)


def test_adapters_of_the_joined_projection_and_its_filters_learn(models):
    sliced, recovered = models["sliced"], models["sliced_recovered"]
    changed = {n for n in sliced.files if not torch.equal(sliced.tensor(n), recovered.tensor(n))}
    learning = r"model\.layers\.[02]\.linear_attn\.(in_proj_qkv|conv1d)\.weight"
    assert changed == {name for name in sliced.files if re.fullmatch(learning, name)}
    assert len(changed) == 4


def test_states_of_the_layers_with_a_delta_rule_are_analysed(models, data):
    ids = torch.from_numpy(data[0])
    for name in ("trained", "refitted_recovered"):
        model = models[name]
        analysis = analyse_rank(
            load(model.folder), ids, model_digest=model.digest(), heads=[(2, 3)], skip=4
        )
        assert analysis.layers == DELTA
        assert analysis.effective_rank.shape == (2, 4, len(ids))  # four heads of values
        assert analysis.capacity == model.shape.width
        assert analysis.spectrum(2, 3).shape == (len(ids) - 4, analysis.capacity)


def test_filters_are_read_from_the_joined_ones(models):
    parts = filters(models["sliced"])
    assert parts.layers == DELTA
    assert parts.q.shape == parts.k.shape == (2, 2, KEPT, 4)
    assert parts.v.shape == (2, 4, WIDTH, 4)
