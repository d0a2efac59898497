"""Standard errors of metrics: how much they depend on the choice of documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
KEPT = 200  # resampled values that a result has
SEED = 0

PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity")


def spread(metric: str, items: Sequence[Any]) -> tuple[float | None, list[float] | None]:
    """The standard error, of a mean by its formula and of a perplexity by bootstrap, and the first
    resampled values, for comparisons with other models on the same documents. A single document has
    neither.

    `items` are what lm-eval keeps per document: a score, a log-likelihood, or a pair of
    log-likelihood and length.
    """
    if len(items) < 2:
        return None, None
    samples = resampled(metric, items)
    if metric in PERPLEXITIES:
        error = np.std(samples, ddof=1)
    else:
        error = np.std(items, ddof=1) / math.sqrt(len(items))
    return float(error), [float(f"{value:.7g}") for value in samples[:KEPT]]


def resampled(metric: str, items: Sequence[Any]) -> NDArray[np.float64]:
    """The metric on documents sampled with replacement; documents, because the words of one are not
    independent.

    Samples depend only on the number of documents. So two models have the same samples of the same
    documents, and the spread of their difference over samples is its uncertainty, without what easy
    and hard documents do to both.
    """
    pairs = np.array([i if np.size(i) == 2 else (i, 1) for i in items], dtype=np.float64)
    total, length = (_times_sampled(len(items)) @ pairs).T
    if metric not in PERPLEXITIES:
        return np.asarray(total / length)
    nats = -total / length
    return np.asarray(nats / math.log(2) if metric == "bits_per_byte" else np.exp(nats))


@lru_cache(maxsize=1)  # those of one task: its metrics share them
def _times_sampled(documents: int) -> NDArray[np.int64]:
    """How often each document is sampled, (RESAMPLES, documents)."""
    generator = np.random.default_rng(SEED)
    return generator.multinomial(documents, [1 / documents] * documents, size=RESAMPLES)
