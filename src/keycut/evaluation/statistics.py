"""How far what a task reports depends on the draw of its documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
KEPT = 200
"""Of the resampled values so many are written down."""
SEED = 0

PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity")


def standard_error(metric: str, items: Sequence[Any]) -> float | None:
    """`items` are what lm-eval keeps per document: a score, a log-likelihood, or a pair of
    log-likelihood and length. One document says nothing of the spread between documents.

    The error of a mean has a formula. Perplexities are bootstrapped.
    """
    if len(items) < 2:
        return None
    if metric not in PERPLEXITIES:
        return float(np.std(items, ddof=1) / math.sqrt(len(items)))
    return float(np.std(resampled(metric, items), ddof=1))


def kept_draws(metric: str, items: Sequence[Any]) -> list[float] | None:
    """The first resampled values, for comparisons with other models on the same documents."""
    if len(items) < 2:
        return None
    return [float(f"{value:.7g}") for value in resampled(metric, items, KEPT)]


def resampled(metric: str, items: Sequence[Any], resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """The metric on documents drawn with replacement, whole, since the words of one stand or fall
    together.

    Which documents a draw takes follows from their number alone. So two models on the same
    documents have the same draws, and what is uncertain of their difference is its spread from
    draw to draw, without what both owe to easy and hard documents.
    """
    pairs = np.array([i if np.size(i) == 2 else (i, 1) for i in items], dtype=np.float64)
    total, length = (_times_drawn(len(items), resamples) @ pairs).T
    if metric not in PERPLEXITIES:
        return np.asarray(total / length)
    nats = -total / length
    return np.asarray(nats / math.log(2) if metric == "bits_per_byte" else np.exp(nats))


@lru_cache(maxsize=2)  # those of one task: its metrics share them
def _times_drawn(documents: int, resamples: int) -> NDArray[np.int64]:
    """How often each document is drawn, (resamples, documents)."""
    draw = np.random.default_rng(SEED)
    return draw.multinomial(documents, [1 / documents] * documents, size=resamples)
