"""Grad: first-order saliency, s_j = sum_i |W_Q,ij dL/dW_Q,ij| + |W_K,ij dL/dW_K,ij|."""

from __future__ import annotations

import torch
from torch import Tensor

from keycut.selection.evidence import Evidence


def scores(evidence: Evidence) -> Tensor:
    """(layers, heads, d_k)."""
    found = evidence.calibrated("grad").tensors
    return torch.stack([found[f"saliency.{side}"] for side in evidence.sides()]).sum(0)
