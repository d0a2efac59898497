"""Pretraining a model of a configuration, with the trainer that its recipe names."""

from __future__ import annotations

from pathlib import Path

import torch

from reproduction.config import Config, Recipe
from reproduction.pretraining.pretrain import pretrain
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.models.checkpoint import create
from statecut.recovery.checkpoints import Output
from statecut.recovery.loop import check_data


def pretrain_model(
    config: Config, model: str, data: Path | str, output: Output, *, gpus: int
) -> dict[str, float]:
    """Train `model` of the configuration on the packed corpus in `data`.

    `gpus` is how many of this machine to use; 0 is a CPU, which only the built-in trainer knows.
    Returns the pace that flame logged.
    """
    recipe = recipe_of(config, model)
    sizes = config.models[model].fla_config()
    if recipe.trainer == "flame":
        from reproduction.pretraining.flame import pretrain_with_flame

        return pretrain_with_flame(sizes, data, recipe, output, gpus=gpus)
    if gpus > 1:
        raise InputError(f"{gpus} GPUs for {model}: the built-in trainer uses one; flame uses many")
    tokens = PackedTokens(data, slice_name=recipe.data.partition("/")[2])
    check_data(tokens, recipe.settings(), sizes["vocab_size"])  # before the model is made
    new = create(sizes, seed=recipe.seed).to(torch.device("cuda" if gpus else "cpu"))
    pretrain(new, tokens, recipe, output)
    return {}


def recipe_of(config: Config, model: str) -> Recipe:
    source = config.models[model].source
    assert source.kind == "pretrain"
    return config.recipes[source.recipe]
