"""Pruned models in a second engine: stock mlx-lm, on a CPU, reads the same folder, its eps too.

It runs on Linux and macOS alike; where it cannot be imported these tests fail.
"""

import numpy as np
import pytest
import torch
from small_models import EXPERTS, LINEAR, VISION, save_stock, some

from statecut.models.checkpoint import Checkpoint, load
from statecut.pruning.slicing import slice_model

# mlx-lm takes the last of every four layers for softmax attention.
SIZES = {**LINEAR, "num_hidden_layers": 4, "linear_key_head_dim": 32}
del SIZES["layer_types"]
CONFIGS = {
    "qwen3_next": {**SIZES, **EXPERTS},
    "qwen3_5": {"text_config": SIZES, "vision_config": VISION},
    "qwen3_5_moe": {"text_config": {**SIZES, **EXPERTS}, "vision_config": VISION},
}
IDS = torch.randint(1, 97, (1, 70), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=CONFIGS)
def pruned(request, tmp_path):
    """A folder, its model cut from 32 key channels to 20."""
    # Hub files have the experts of Qwen3.5 in one tensor, and those of Qwen3-Next apart.
    apart = {"save_original_format": request.param == "qwen3_next"}
    folder = save_stock(tmp_path / "whole", request.param, CONFIGS[request.param], **apart)
    checkpoint = Checkpoint(folder)
    keys = some(checkpoint.shape, 20, "key", seed=5)
    for eps in ("kept", "matched"):
        slice_model(checkpoint, keys, tmp_path / eps, dtype=None, eps=eps)
    return tmp_path / "matched"


def test_logits_and_greedy_tokens_are_those_of_transformers(pruned):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    with mx.stream(mx.cpu):
        model, _ = load_model(pruned)
        logits = np.array(model(mx.array(IDS.numpy())))
        cache, tokens = make_prompt_cache(model), IDS.numpy()
        continued = []
        for _ in range(32):
            best = model(mx.array(tokens), cache=cache)[:, -1:].argmax(-1)
            continued.append(best.item())
            tokens = np.array(best)
    ours = load(pruned)
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), ours(IDS).logits, rtol=0, atol=1e-5)
        kept = load(pruned.with_name("kept"))(IDS).logits  # the same weights with another eps
        assert (kept - ours(IDS).logits).abs().max() > 1e-3
        whole = ours.generate(IDS, max_new_tokens=32, do_sample=False, pad_token_id=0)
    assert len(set(continued)) > 3
    assert continued == whole[0, IDS.shape[1] :].tolist()
