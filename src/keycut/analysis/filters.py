"""The short convolution filters of a model, head by head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keycut.errors import InputError
from keycut.models.checkpoint import Checkpoint


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
    shape = checkpoint.shape
    stored = checkpoint.stored
    mixer = checkpoint.architecture.mixer
    sides = {}
    for side, heads in (("q", shape.heads), ("k", shape.heads), ("v", shape.value_heads)):
        per_layer = []
        for layer in shape.layers:
            name = f"{mixer.format(layer=layer)}{side}_conv1d.weight"
            if name not in stored:
                raise InputError(f"{checkpoint.folder} has no {name}: a model without filters")
            weight = checkpoint.tensor(stored[name])[:, 0].float().numpy()  # (filters, W)
            per_layer.append(weight.reshape(min(heads, len(weight)), -1, weight.shape[-1]))
        sides[side] = np.stack(per_layer)
    return Filters(shape.layers, **sides)
