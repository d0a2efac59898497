"""The effective rank of many matrices at once: er(S) = ||S||_F² / ||S||_2²."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# log λ_1 is known to this when squaring ends. Rounding in float32 is larger.
TOLERANCE = 1e-7


def effective_ranks(states: Tensor) -> Tensor:
    """er (N) of many matrices (N, m, n), without an SVD; 0 for a matrix of zeros, and NaN for one
    that is not finite.

    With G = S Sᵀ / ||S||_F² of the smaller side, er = 1 / λ_1(G).
    """
    norms = torch.linalg.vector_norm(states, dim=(-2, -1), keepdim=True)
    usable = (norms > 0) & norms.isfinite()
    S = torch.where(usable, states / norms, 0.0)
    G = S @ S.mT if S.shape[-2] <= S.shape[-1] else S.mT @ S
    # LAPACK takes them one by one, as a GPU's library may: there products are the faster way.
    largest = largest_eigenvalues(G) if G.is_cuda else torch.linalg.eigvalsh(G)[:, -1]
    return torch.where(usable.flatten(), 1 / largest, 0 * norms.flatten())


def largest_eigenvalues(G: Tensor) -> Tensor:
    """λ_1 (N) of G (N, n, n), symmetric and positive, by squaring: nothing but matrix products.

    With A_0 = G, r_p = ||A_p||_F and A_{p+1} = (A_p / r_p)²,

        log λ_1 = log r_0 + log r_1 / 2 + log r_2 / 4 + ...,       n^(-1/2) <= r_p <= 1 from p = 1.

    r_p never falls from there on, so that the rest after the term of p is at most that term. An
    error made at p counts 2^-p: float32 is enough.
    """
    A = G
    log_largest = torch.zeros(len(G), dtype=G.dtype, device=G.device)
    most = math.ceil(math.log2(math.log(max(2, G.shape[-1])) / 2 / TOLERANCE))
    for p in range(most + 1):
        r = torch.linalg.vector_norm(A, dim=(-2, -1)).clamp(min=torch.finfo(A.dtype).tiny)
        term = r.log() / 2**p
        log_largest += term
        if p and term.abs().max() < TOLERANCE:
            break
        A = A / r[:, None, None]
        A = A @ A
    return log_largest.exp()
