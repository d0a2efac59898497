"""One file holds every width of a selection, as if each had been made alone."""

import json

import pytest
import torch
from small_models import SMALL

from statecut.models import create, load, save
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.calibration import calibrate
from statecut.pruning.methods import METHODS
from statecut.pruning.select import select
from statecut.pruning.selection import load_selection, save_selections
from statecut.pruning.statistics import ModelStatistics

IDS = torch.randint(0, 97, (6, 80), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection") / "model"
    save(create(SMALL["gated_value_heads"], seed=6), folder)
    digest = {"model_digest": Checkpoint(folder).digest()}
    calibration = calibrate(load(folder), [IDS], sample_rows=200, values=True, provenance=digest)
    return ModelStatistics(Checkpoint(folder), calibration)


@pytest.mark.parametrize("channels", ["key", "value"])
@pytest.mark.parametrize("method", METHODS)
def test_a_width_of_the_file_is_the_selection_of_that_width(model, tmp_path, method, channels):
    if channels == "value" and not METHODS[method].values:
        pytest.skip("it chooses no value channels")
    _, full = model.checkpoint.shape.size(channels)
    every = select(method, model, range(1, full), channels=channels)
    for name in ("again.safetensors", "s.safetensors"):
        save_selections(every, tmp_path / name)
    again, first = (path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert again == first
    for width in range(1, full):
        (alone,) = select(method, model, [width], channels=channels)
        again = load_selection(tmp_path / "s.safetensors", keys=width, values=width)
        again.check_model(model.checkpoint)
        assert again.about == json.loads(json.dumps(alone.about))
        assert again.tensors.keys() == alone.tensors.keys()
        for name, tensor in alone.tensors.items():
            assert torch.equal(again.tensors[name], tensor), name
