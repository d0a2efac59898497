"""The built-in trainer: a new model, one device, the recipe of the configuration.

flame trains on many GPUs; this one on the CPU of a laptop or on one GPU, in the same way: where
the recipe counts on several GPUs, a step goes through that many batches one after the other.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from reproduction.config.training import Recipe
from statecut.data.packing import PackedTokens
from statecut.recovery.checkpoints import Output
from statecut.recovery.loop import Losses, check_data, explain_out_of_memory, train


def pretrain(model: Any, data: PackedTokens, recipe: Recipe, output: Output) -> None:
    """Train a model, wherever it is, and write it to a folder with its loss curve: trained in
    float32, on a GPU with products in bf16, and written in the recipe's type."""
    check_data(data, recipe.settings(), model.config.vocab_size)
    output.check()
    model.float()

    def loss(ids: Tensor) -> Losses:
        ce = model(ids, labels=ids, use_cache=False).loss
        return Losses(ce, ce)

    run = output.checkpoints_of(
        "pretraining",
        data,
        model=fingerprint(model),
        recipe=recipe.defining(),
        device=model.device.type,
    )
    with run as checkpoints:
        with explain_out_of_memory("pretraining", smaller_batches(recipe)):
            train(
                model, loss, data, recipe.settings(), checkpoints,
                work="pretraining", save_seconds=output.save_seconds,
            )  # fmt: skip
        output.write(model.to(getattr(torch, recipe.dtype)), checkpoints)


def smaller_batches(recipe: Recipe) -> str:
    """What to change where a batch does not fit into a GPU."""
    batch, share = recipe.batch, recipe.world_size
    if batch == 1:
        return "batch is 1 already: use a GPU with more memory"
    fewer = batch // next(n for n in range(2, batch + 1) if batch % n == 0)
    return (
        f"`batch` of the recipe is {batch}, and `world_size` {share}: with {fewer} and "
        f"{batch * share // fewer} a step has the same sequences in smaller batches, and the run "
        "starts anew"
    )


def fingerprint(model: Any) -> str:
    """A digest of a model in memory: its config and its weights as they start."""
    hashed = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()
