"""The built-in trainer: a new model, one device, the recipe of the configuration.

flame trains on many GPUs; this one on the CPU of a laptop or on one GPU, in the same way: where
the recipe counts on several GPUs, a step goes through that many batches one after the other.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keycut import __version__
from keycut.artefact import atomic_write, check_output_path
from keycut.config.training import Recipe
from keycut.data.packing import PackedTokens
from keycut.models.checkpoint import save
from keycut.training.checkpoints import Checkpoints
from keycut.training.loop import (
    EVERY_TEN_MINUTES,
    Losses,
    Saving,
    check_data,
    explain_out_of_memory,
    train,
)


def pretrain(
    model: Any,
    data: PackedTokens,
    recipe: Recipe,
    out: Path | str,
    *,
    checkpoints: Path | str,
    tokenizer: Path | str | None = None,
    card: str | None = None,
    saving: Saving = EVERY_TEN_MINUTES,
    force: bool = False,
    version: int = 1,
) -> None:
    """Train a model, wherever it is, and write it to a folder with its loss curve.

    `checkpoints` is where running jobs keep theirs, `tokenizer` a folder to copy its files from,
    `card` the text of the model's README.md. The model is trained in float32, on a GPU
    with products in bf16.
    """
    check_data(data, recipe, model.config.vocab_size)
    check_output_path(out, force=force)
    model.float()
    run = {
        "work": "pretraining",
        "model": fingerprint(model),
        "recipe": recipe.defining(),
        "data": {"sha256": data.manifest.sha256, "sequences": len(data)},
        "device": model.device.type,
        "version": version,
        "keycut": __version__,
    }

    def loss(ids: Tensor) -> Losses:
        ce = model(ids, labels=ids, use_cache=False).loss
        return Losses(ce, ce)

    with Checkpoints(checkpoints, run) as kept:
        with explain_out_of_memory("pretraining", smaller_batches(recipe)):
            train(
                model, loss, data, recipe, kept,
                work="pretraining", saving=saving, accumulate=recipe.world_size,
            )  # fmt: skip
        write(model, out, kept, tokenizer=tokenizer, card=card, force=force)


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


def write(
    model: Any,
    out: Path | str,
    kept: Checkpoints,
    *,
    tokenizer: Path | str | None,
    card: str | None,
    force: bool,
    beside: Iterable[Path] = (),
) -> None:
    """The model's folder, with the loss curve and other files in it; then the checkpoints have
    done their work."""
    with atomic_write(out, folder=True, force=force) as aside:
        save(model, aside, tokenizer=tokenizer, card=card, force=True)
        for path in (kept.curve, *beside):
            shutil.copyfile(path, aside / path.name)
    kept.remove()


def fingerprint(model: Any) -> str:
    """A digest of a model in memory: its config and its weights as they start."""
    hashed = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()
