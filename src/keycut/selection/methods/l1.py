"""L1: the weight of a channel, s_j = sum_i |W_Q,ij| + |W_K,ij|."""

from __future__ import annotations

from keycut.selection.method import Evidence, Method, Tensor


def score(evidence: Evidence) -> Tensor:
    return evidence.sum_over_target(lambda side: evidence.weight_magnitudes(side).sum(-1))


METHODS = (
    Method("l1", label="L1", about="Keeps the largest weights.", colour="#1e795d", dash=(4, 1.5),
           score=score),
)  # fmt: skip
