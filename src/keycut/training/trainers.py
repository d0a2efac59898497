"""Pretraining a model of a configuration, with the trainer that its recipe names."""

from __future__ import annotations

from pathlib import Path

import torch

from keycut.config import Config, Recipe
from keycut.data.packing import PackedTokens
from keycut.errors import InputError, nearest
from keycut.models.checkpoint import create
from keycut.training.flame import Pace, check_gpus, pretrain_with_flame
from keycut.training.loop import EVERY_TEN_MINUTES, Saving, check_data
from keycut.training.pretrain import pretrain


def pretrain_model(
    config: Config,
    model: str,
    data: Path | str,
    out: Path | str,
    *,
    checkpoints: Path | str,
    tokenizer: Path | str,
    gpus: int,
    card: str | None = None,
    saving: Saving = EVERY_TEN_MINUTES,
    force: bool = False,
    version: int = 1,
) -> Pace | None:
    """Train `model` of the configuration on the packed corpus in `data` and write it to `out`.

    `checkpoints` is where running jobs keep theirs, `tokenizer` the folder of the model's own,
    `card` the text of its README.md, `gpus` how many of this machine to use; 0 is a CPU, which
    only the built-in trainer knows. `version` is the stage's (`keycut.running.code`): with
    another one a run begins anew. What is returned is what flame said of its speed.
    """
    recipe = recipe_of(config, model)
    sizes = config.models[model].fla_config()
    if recipe.trainer == "flame":
        return pretrain_with_flame(
            sizes, data, recipe, out, checkpoints=checkpoints, tokenizer=tokenizer, gpus=gpus,
            card=card, saving=saving, force=force, version=version,
        )  # fmt: skip
    if gpus > 1:
        raise InputError(f"{gpus} GPUs for {model}: the built-in trainer uses one; flame uses many")
    if gpus:
        check_gpus(gpus)
    tokens = PackedTokens(data, slice_name=recipe.data.partition("/")[2])
    check_data(tokens, recipe, sizes["vocab_size"])  # before the model is made
    new = create(sizes, seed=recipe.seed).to(torch.device("cuda" if gpus else "cpu"))
    pretrain(
        new, tokens, recipe, out, checkpoints=checkpoints, tokenizer=tokenizer, card=card,
        saving=saving, force=force, version=version,
    )  # fmt: skip
    return None


def recipe_of(config: Config, model: str) -> Recipe:
    """How a model of the configuration is pretrained."""
    if model not in config.models:
        raise InputError(f"no model {model!r} in the configuration{nearest(model, config.models)}")
    source = config.models[model].source
    if source.kind != "pretrain":
        raise InputError(f"{model} is not pretrained by this run: its source is {source.kind!r}")
    return config.recipes[source.recipe]
