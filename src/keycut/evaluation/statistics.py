"""Standard errors of what a task reports, over the draw of its documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 1000
SEED = 0


def standard_error(metric: str, items: Sequence[Any]) -> float | None:
    """`items` are what lm-eval keeps per document: a score, a log-likelihood, or a pair of
    log-likelihood and length. One document says nothing of the spread between documents.

    The error of a mean has a formula. Perplexities are bootstrapped: documents are drawn with
    replacement, whole, since the words of one stand or fall together.
    """
    if len(items) < 2:
        return None
    if metric not in ("word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity"):
        return float(np.std(items, ddof=1) / math.sqrt(len(items)))
    pairs = np.array([(i, 1) if metric == "perplexity" else i for i in items], dtype=np.float64)
    draw = np.random.default_rng(SEED)
    # How often each document is drawn, (resamples, documents).
    times = draw.multinomial(len(items), [1 / len(items)] * len(items), size=RESAMPLES)
    likelihood, length = (times @ pairs).T
    nats = -likelihood / length
    values = nats / math.log(2) if metric == "bits_per_byte" else np.exp(nats)
    return float(np.std(values, ddof=1))
