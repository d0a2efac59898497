"""Pretraining a model of a configuration, with flame or with the built-in trainer.

flame trains on many GPUs; the built-in trainer on the CPU of a laptop or on one GPU, in the same
way: where the recipe counts on several GPUs, a step goes through that many batches one after the
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reproduction.config import Config, Recipe
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.models.checkpoint import create
from statecut.recovery.checkpoints import Output
from statecut.recovery.loop import Losses, check_data, explain_out_of_memory, train

SMALLER_BATCHES = "halve `batch` of the recipe and double `world_size`, which starts anew"


def pretrain_model(
    config: Config, model: str, data: Path | str, output: Output, *, gpus: int
) -> None:
    """Train `model` of the configuration on the packed corpus in `data`.

    `gpus` is how many of this machine to use; 0 is a CPU, which only the built-in trainer knows.
    """
    recipe = config.recipe_of(model)
    sizes = config.models[model].fla_config()
    if recipe.trainer == "flame":
        from reproduction.pretraining.flame import pretrain_with_flame

        pretrain_with_flame(sizes, data, recipe, output, gpus=gpus)
        return
    if gpus > 1:
        raise InputError(f"{gpus} GPUs for {model}: the built-in trainer uses one; flame uses many")
    tokens = PackedTokens(data, slice_name=recipe.data.partition("/")[2])
    new = create(sizes, seed=recipe.seed).to(torch.device("cuda" if gpus else "cpu"))
    pretrain(new, tokens, recipe, output)


def pretrain(model: Any, data: PackedTokens, recipe: Recipe, output: Output) -> None:
    """Train a model, wherever it is, and write it to a folder with its loss curve: trained in
    float32, on a GPU with products in bf16, and written in the recipe's type."""
    check_data(data, recipe.settings(), model.config.vocab_size)
    output.check()
    model.float()

    def loss(ids: Tensor) -> Losses:
        ce = model(ids, labels=ids, use_cache=False).loss
        return Losses(ce, ce)

    defining = {"model": model.config.to_dict(), "recipe": recipe.defining()}
    run = output.checkpoints_of("pretraining", data, **defining, device=model.device.type)
    with run as checkpoints:
        with explain_out_of_memory("pretraining", SMALLER_BATCHES):
            train(
                model, loss, data, recipe.settings(), checkpoints,
                work="pretraining", save_seconds=output.save_seconds,
            )  # fmt: skip
        output.write(model.to(getattr(torch, recipe.dtype)), checkpoints)
