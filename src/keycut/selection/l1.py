"""L1: the weight of a channel, s_j = sum_i |W_Q,ij| + |W_K,ij|."""

from __future__ import annotations

import torch
from torch import Tensor

from keycut.selection.evidence import Evidence


def scores(evidence: Evidence) -> Tensor:
    """(layers, heads, d_k)."""
    return torch.stack([evidence.weights(side).sum(-1) for side in evidence.sides()]).sum(0)
