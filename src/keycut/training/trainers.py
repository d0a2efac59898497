"""Pretraining a model of a configuration, with the trainer that its recipe names."""

from __future__ import annotations

from pathlib import Path

import torch

from keycut import __version__
from keycut.config import Config, Recipe
from keycut.data.packing import PackedTokens
from keycut.errors import InputError, nearest
from keycut.models.architectures import ARCHITECTURES
from keycut.models.checkpoint import create
from keycut.training.flame import Pace, pretrain_with_flame, refuse_gpus
from keycut.training.loop import EVERY_TEN_MINUTES, Saving, refuse_data
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
    saving: Saving = EVERY_TEN_MINUTES,
    force: bool = False,
) -> Pace | None:
    """Train `model` of the configuration on the packed corpus in `data` and write it to `out`.

    `checkpoints` is where running jobs keep theirs, `tokenizer` the folder of the model's own,
    `gpus` how many of this machine to use; 0 is a CPU, which only the built-in trainer knows.
    """
    recipe = recipe_of(config, model)
    sizes = config.models[model].fla_config()
    tokens = PackedTokens(data, slice_name=recipe.data.partition("/")[2])
    text = card(config, model, recipe, tokens)
    if recipe.trainer == "flame":
        return pretrain_with_flame(
            sizes, data, recipe, out, checkpoints=checkpoints, tokenizer=tokenizer, gpus=gpus,
            card=text, saving=saving, force=force,
        )  # fmt: skip
    if gpus > 1:
        raise InputError(f"{gpus} GPUs for {model}: the built-in trainer uses one; flame uses many")
    if gpus:
        refuse_gpus(gpus)
    refuse_data(tokens, recipe, sizes["vocab_size"])  # before the model is made
    new = create(sizes, seed=recipe.seed).to(torch.device("cuda" if gpus else "cpu"))
    pretrain(
        new, tokens, recipe, out, checkpoints=checkpoints, tokenizer=tokenizer, card=text,
        saving=saving, force=force,
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


def card(config: Config, model: str, recipe: Recipe, tokens: PackedTokens) -> str:
    """README.md of a pretrained model: what it is and how it was made."""
    spec, source = config.models[model], tokens.manifest.source
    facts = {
        "parameters": f"{spec.parameters:,}",
        "trainer": recipe.trainer,
        "data": f"{source.name} ({source.revision})",
        "data digest": tokens.manifest.sha256,
        "tokens": f"{recipe.sequences * tokens.manifest.sequence_length:,}",
        "steps": f"{recipe.steps:,} of {recipe.batch * recipe.world_size} sequences",
        "learning rate": f"{recipe.learning_rate:g}, warm-up {recipe.warmup}, to {recipe.floor:g}",
        "seed": recipe.seed,
        "made by": f"keycut {__version__}",
    }
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
    stock = ARCHITECTURES[spec.fla_config()["model_type"]].stock
    return (
        "---\nlibrary_name: transformers\ntags:\n- keycut\n- linear-attention\n---\n\n"
        f"# {model}\n\n{spec.label}, pretrained by Keycut; its loss curve is in loss.csv.\n\n"
        f"| | |\n|---|---|\n{rows}\n"
        f"    import {'fla' if stock else 'keycut.models.shared_conv'}\n"
        "    from transformers import AutoModelForCausalLM\n"
        f'    model = AutoModelForCausalLM.from_pretrained("{model}")\n'
    )
