"""S-Wanda: weights by the size of what they meet, s_j = sum_i (|W_q,ij| + |W_k,ij|) ||X_:i||_2."""

from __future__ import annotations

import torch
from torch import Tensor

from keycut.selection.evidence import Evidence


def scores(evidence: Evidence) -> Tensor:
    """(layers, heads, d_k)."""
    norms = evidence.calibrated("s_wanda").tensors["input_norm"]  # (layers, hidden)
    parts = [
        torch.einsum("lhdi,li->lhd", evidence.weights(side), norms) for side in evidence.sides()
    ]
    return torch.stack(parts).sum(0)
