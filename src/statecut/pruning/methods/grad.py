"""Grad: first-order saliency, s_j = sum_i |W_Q,ij dL/dW_Q,ij| + |W_K,ij dL/dW_K,ij|."""

from __future__ import annotations

from statecut.pruning.method import Method, ModelStatistics, Target, Tensor


def score(model: ModelStatistics, target: Target) -> Tensor:
    return model.sum_over(target, model.saliency)


METHODS = (
    Method("grad", label="Grad", about="Keeps the largest first-order effect on the loss.",
           colour="#d37e17", needs=("text", "gradients"), score=score),
)  # fmt: skip
