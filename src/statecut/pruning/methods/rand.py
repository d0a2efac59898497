"""Rand: the same chance for every channel. A seed's choices nest: a smaller width keeps a part of
what a larger one keeps. The target makes no difference."""

from __future__ import annotations

from statecut.pruning.method import Method, ModelStatistics, Target, Tensor


def score(model: ModelStatistics, target: Target, *, seed: int) -> Tensor:
    import numpy as np
    import torch

    shape = model.checkpoint.shape
    size = (len(shape.layers), *shape.size("value" if target == "v" else "key"))
    # Values are sampled apart from keys, also where there are as many.
    generator = np.random.default_rng([seed, 1] if target == "v" else seed)
    return torch.from_numpy(generator.random(size))


METHODS = (
    Method("rand", label="Rand", about="Keeps channels by chance.", colour="#939095", dash=(2, 1),
           needs=("seed",), values=True, score=score),
)  # fmt: skip
