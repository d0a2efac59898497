"""How well conditioned kept columns are, from the Gram matrix of all."""

from __future__ import annotations

import torch
from torch import Tensor


def spectrum_from_gram(gram: Tensor, kept: Tensor | None = None) -> Tensor:
    """Singular values (..., keep), descending, of the columns `kept` (..., keep) of M, from
    `gram` = MᵀM (..., n, n); of all columns without `kept`.

    The Gram matrix holds their squares: what lies below sqrt(n ε) of the largest is rounding,
    and is returned as zero.
    """
    gram = gram.to(torch.float64)
    if kept is not None:
        gram = gram.gather(-2, kept[..., None].expand(*kept.shape, gram.shape[-1]))
        gram = gram.gather(-1, kept[..., None, :].expand(*kept.shape, kept.shape[-1]))
    squares = torch.linalg.eigvalsh(gram).flip(-1)
    rounding = gram.shape[-1] * torch.finfo(torch.float64).eps * squares[..., :1]
    return torch.where(squares > rounding, squares, 0.0).sqrt()


def condition_number(sigma: Tensor) -> Tensor:
    """σ_max / σ_min over the nonzero singular values (..., n), inf where there is none.

    Over the nonzero ones, as the paper's bounds on the effective rank need it: they hold only so
    when columns are dependent.
    """
    smallest = torch.where(sigma > 0, sigma, torch.inf).amin(-1)
    largest = sigma.amax(-1)
    return torch.where(largest > 0, largest / smallest, torch.inf)


def effective_rank(sigma: Tensor) -> Tensor:
    """The paper's er = ||M||_F² / ||M||_2² from singular values (..., n); 0 where all are zero."""
    squares = sigma.square()
    largest = squares.amax(-1)
    return torch.where(largest > 0, squares.sum(-1) / largest, 0.0)
