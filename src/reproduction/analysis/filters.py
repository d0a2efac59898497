"""The short convolution filters of a model, head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from statecut.errors import InputError

if TYPE_CHECKING:
    from statecut.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Filters:
    """q, k, v: (layers, heads, channels, W) float32; the last weight is the current token's.

    Values may have more heads than keys. A filter that a head shares stands there once
    (channels = 1), and one that all heads share too (heads = 1).
    """

    layers: tuple[int, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def filters(checkpoint: Checkpoint) -> Filters:
    """All q, k and v filters of a model folder; nothing else of it is read."""
    shape, stored = checkpoint.shape, checkpoint.stored
    heads = {"q": shape.heads, "k": shape.heads, "v": shape.value_heads}
    sides: dict[str, list[np.ndarray]] = {side: [] for side in heads}

    def read(name: str) -> np.ndarray:  # (filters, W)
        if name not in stored:
            raise InputError(f"{checkpoint.folder} has no {name}: a model without filters")
        return checkpoint.tensor(stored[name])[:, 0].float().numpy()

    for layer in shape.layers:
        at = checkpoint.architecture.mixer.format(layer=layer)
        if f"{at}conv1d.weight" in stored:  # those of q, k and v in one
            keys = shape.heads * shape.width
            weights = np.split(read(f"{at}conv1d.weight"), [keys, 2 * keys])
        else:
            weights = [read(f"{at}{side}_conv1d.weight") for side in sides]
        for side, weight in zip(sides, weights, strict=True):
            per_head = weight.reshape(min(heads[side], len(weight)), -1, weight.shape[-1])
            sides[side].append(per_head)
    return Filters(shape.layers, **{side: np.stack(layers) for side, layers in sides.items()})
