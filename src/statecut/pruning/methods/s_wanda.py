"""S-Wanda: weights by the size of what they meet, s_j = sum_i (|W_q,ij| + |W_k,ij|) ||X_:i||_2."""

from __future__ import annotations

from statecut.pruning.method import Method, ModelStatistics, Target, Tensor


def score(model: ModelStatistics, target: Target) -> Tensor:
    from torch import einsum

    return model.sum_over(
        target,
        lambda side: einsum("lhdi,li->lhd", model.weight_magnitudes(side), model.input_norms),
    )


METHODS = (
    Method("s_wanda", label="S-Wanda", colour="#b23eb7", dash=(6, 1.5, 1, 1.5), needs=("text",),
           about="Keeps the largest weights, times the size of their inputs.",
           values=True, score=score),
)  # fmt: skip
