"""Which trainer trains a model of a configuration, and what it is given."""

import pytest
import torch
from training_runs import packed

from reproduction.config import load_config
from reproduction.new_tokenizers import train_tokenizer
from reproduction.pretraining.pretrain import pretrain_model
from statecut.errors import InputError
from statecut.models.checkpoint import load
from statecut.recovery.checkpoints import Checkpoints, Output


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("trainers")
    packed(root / "tokens")
    train_tokenizer(["a few words"] * 9, root / "tokenizer", vocabulary_size=257)
    return root


def config_with(**changes):
    """The demo's configuration with a recipe of few steps."""
    config = load_config("config/demo.yaml")
    recipe = config.recipes["demo"].model_copy(
        update={"data": "documentation/training", "steps": 3, "warmup": 1, "batch": 2, **changes}
    )
    return config.model_copy(update={"recipes": {"demo": recipe}})


def train(root, config, out, gpus=0, version=1):
    kept = {
        "tokenizer": root / "tokenizer",
        "files": lambda _: {"README.md": "a card"},
        "version": version,
    }
    output = Output(out, root / "running", **kept)
    pretrain_model(config, "delta_net_head", root / "tokens", output, gpus=gpus)


def test_the_built_in_trainer_makes_a_model_with_all_that_belongs_to_it(root, tmp_path):
    for dtype in ("float32", "bfloat16"):
        config = config_with(dtype=dtype)
        train(root, config, tmp_path / dtype)
    files = {path.name for path in (tmp_path / "float32").iterdir()}
    assert {"loss.csv", "README.md", "tokenizer.json", "config.json"} <= files
    assert (tmp_path / "float32" / "README.md").read_text() == "a card"
    model, rounded = (load(tmp_path / dtype) for dtype in ("float32", "bfloat16"))
    spec = config.models["delta_net_head"]
    assert sum(p.numel() for p in model.parameters()) == spec.parameters
    trained, written = model.state_dict(), rounded.state_dict()
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert all(torch.equal(written[name], trained[name].bfloat16()) for name in trained)


@pytest.mark.parametrize("trainer", ["builtin", "flame"])
def test_a_raised_version_begins_anew(root, tmp_path, monkeypatch, trainer):
    folders = []

    class Noted(Checkpoints):
        def __enter__(self):
            folders.append(self.folder)
            raise InterruptedError

    monkeypatch.setattr("statecut.recovery.checkpoints.Checkpoints", Noted)
    config = config_with(trainer=trainer)
    for version in (1, 1, 2):
        with pytest.raises(InterruptedError):
            train(root, config, tmp_path / "out", gpus=int(trainer == "flame"), version=version)
    assert folders[0] == folders[1] != folders[2]


def test_the_built_in_trainer_refuses_gpus_that_it_cannot_use(root, tmp_path):
    with pytest.raises(InputError, match="the built-in trainer uses one"):
        train(root, config_with(), tmp_path / "out", gpus=2)
