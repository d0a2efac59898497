"""S-Wanda: weights by the size of what they meet, s_j = sum_i (|W_q,ij| + |W_k,ij|) ||X_:i||_2."""

from __future__ import annotations

from keycut.selection.method import Evidence, Method, Tensor


def score(evidence: Evidence) -> Tensor:
    from torch import einsum

    norms = evidence.measured.tensors["input_norm"]  # (layers, hidden)
    return evidence.sum_over_target(
        lambda side: einsum("lhdi,li->lhd", evidence.weight_magnitudes(side), norms)
    )


METHODS = (
    Method("s_wanda", label="S-Wanda", colour="#b23eb7", dash=(6, 1.5, 1, 1.5), needs=("text",),
           about="Keeps the largest weights, times the size of their inputs.", score=score),
)  # fmt: skip
