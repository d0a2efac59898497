"""Filters come out as the model applies them."""

import numpy as np
import pytest
import torch
from small_models import SMALL

from reproduction.analysis.filters import filters
from statecut.errors import InputError
from statecut.models.checkpoint import Checkpoint, create, save

SHAPES = {  # (heads, channels) of q and k, and of v
    "delta_net": ((2, 16), (2, 16)),
    "shared_head": ((2, 1), (2, 1)),
    "shared_all": ((1, 1), (1, 1)),
    "gated": ((2, 16), (2, 24)),
    "gated_value_heads": ((2, 8), (4, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_filter_stands_with_its_head(name, tmp_path):
    model = create(SMALL[name], seed=3, dtype=torch.bfloat16)
    save(model, tmp_path / "m")
    found = filters(Checkpoint(tmp_path / "m"))
    keys, values = SHAPES[name]
    assert found.q.shape == found.k.shape == (2, *keys, 4)
    assert found.v.shape == (2, *values, 4)
    assert found.v.dtype == np.float32
    for layer in range(2):
        for side in "qkv":
            weight = getattr(model.model.layers[layer].attn, f"{side}_conv1d").weight
            heads, channels = values if side == "v" else keys
            for head in range(heads):
                mine = weight[head * channels : (head + 1) * channels, 0].detach().float().numpy()
                np.testing.assert_array_equal(getattr(found, side)[layer, head], mine)


def test_a_model_without_filters_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="ShortConvolution"):
        save(create({**SMALL["delta_net"], "use_short_conv": False}, seed=3), tmp_path / "m")
    with pytest.raises(InputError, match=r"q_conv1d.weight: a model without filters"):
        filters(Checkpoint(tmp_path / "m"))


def test_filters_that_are_one_tensor_are_taken_apart(folders):
    model = Checkpoint(folders / "qwen3_5_tied")
    found = filters(model)
    assert found.layers == (0, 2)  # softmax attention stands between them
    assert (found.q.shape, found.v.shape) == ((2, 2, 16, 4), (2, 4, 12, 4))
    for place, layer in enumerate(found.layers):
        joined = model.tensor(f"model.layers.{layer}.linear_attn.conv1d.weight")[:, 0]
        sides = [getattr(found, side)[place].reshape(-1, 4) for side in "qkv"]
        np.testing.assert_array_equal(np.concatenate(sides), joined)
