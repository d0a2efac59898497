"""Grad: first-order saliency, s_j = sum_i |W_Q,ij dL/dW_Q,ij| + |W_K,ij dL/dW_K,ij|."""

from __future__ import annotations

from keycut.selection.method import Evidence, Method, Tensor


def score(evidence: Evidence) -> Tensor:
    return evidence.sum_over_target(lambda side: evidence.measured.tensors[f"saliency.{side}"])


METHODS = (
    Method("grad", label="Grad", about="Keeps the largest first-order effect on the loss.",
           colour="#d37e17", needs=("text", "gradients"), score=score),
)  # fmt: skip
