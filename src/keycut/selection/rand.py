"""Rand: the same chance for every channel. A seed's choices nest: a smaller width keeps a part of
what a larger one keeps. The target makes no difference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keycut.selection.evidence import Evidence


def scores(evidence: Evidence) -> Tensor:
    """(layers, heads, d_k)."""
    shape = evidence.checkpoint.shape
    size = (len(shape.layers), shape.heads, shape.width)
    return torch.from_numpy(np.random.default_rng(evidence.seed).random(size))
