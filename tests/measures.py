"""The paper's measures of a matrix, one at a time and exactly.

    er(S) = ||S||_F² / ||S||_2²       u(S) = er(S) / min(d_k, d_v)       κ(S) = σ_1 / σ_r

κ runs over the r singular values that are not zero: the paper's bounds hold only so.
"""

import torch
from torch import Tensor

from statecut.pruning.conditioning import condition_number, effective_rank


def singular_values(A: Tensor) -> Tensor:
    """(..., min(m, n)) of A (..., m, n), descending; what is rounding of σ_1 is zero."""
    sigma = torch.linalg.svdvals(A)
    rounding = max(A.shape[-2:]) * torch.finfo(sigma.dtype).eps * sigma[..., :1]
    return torch.where(sigma > rounding, sigma, 0.0)


def rank(A: Tensor) -> Tensor:
    return (singular_values(A) > 0).sum(-1)


def er(A: Tensor) -> Tensor:
    return effective_rank(singular_values(A))


def u(A: Tensor) -> Tensor:
    return er(A) / min(A.shape[-2:])


def kappa(A: Tensor) -> Tensor:
    return condition_number(singular_values(A))
