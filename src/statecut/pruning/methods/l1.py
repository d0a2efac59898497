"""L1: the weight of a channel, s_j = sum_i |W_Q,ij| + |W_K,ij|; of values, the row that makes it
times the column that reads it, s_j = (sum_i |W_V,ij|) (sum_i |W_O,ji|)."""

from __future__ import annotations

from statecut.pruning.method import Method, ModelStatistics, Target, Tensor


def score(model: ModelStatistics, target: Target) -> Tensor:
    return model.sum_over(target, lambda side: model.weight_magnitudes(side).sum(-1))


METHODS = (
    Method("l1", label="L1", about="Keeps the largest weights.", colour="#1e795d", dash=(4, 1.5),
           values=True, score=score),
)  # fmt: skip
