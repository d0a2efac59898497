"""Strong rank-revealing QR (Gu and Eisenstat 1996): the columns of a matrix that span most.

    M Π = Q [A_k B_k]     A_k: (k, k), C_k: (n - k, n - k)
            [ 0  C_k]

Column pivoting gives a first Π. A swap of kept column i with dropped column j multiplies
|det A_k| by exactly

    ρ_ij = sqrt((A_k⁻¹ B_k)_ij² + (γ_j(C_k) / ω_i(A_k))²),

where γ_j is the norm of column j of C_k and 1 / ω_i that of row i of A_k⁻¹. Swaps are made, the
largest gain first, until none exceeds f. Then, with q = sqrt(1 + f² k (n - k)), for all i and j,
σ_i(A_k) >= σ_i(M) / q and σ_j(C_k) <= σ_{k+j}(M) q.

One factorisation serves every width: `strong_swaps(pivoted_cholesky(gram), keep)`. It is worked on
by the CPU in float64 wherever the input lies: a GPU has no pivoted factorisation, and the choice
must not depend on the device. Results go back to it.

At the edges:
- Rank below `keep` (few rows, zero or duplicate columns): the independent columns come first,
  swapped as if `keep` were the rank, and the lowest remaining indices fill up. `largest_gain` is
  that of the independent columns, `log_volume` is -inf.
- A pivot counts as zero from max(rows, n) ε times the largest downwards; of a Gram matrix, which
  holds squares, from sqrt(n ε) (2e-7 at n = 128), and its gains beyond 1e6 are not resolved.
- Of columns that tie either may be kept, but always the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from numpy.typing import ArrayLike
from scipy.linalg.lapack import dpstrf
from torch import Tensor

from statecut.errors import InputError

EPS = torch.finfo(torch.float64).eps
# A gain this near f counts as f. Otherwise f = 1 would swap a column for its duplicate.
ROUNDING = 1e-10
# Below this a pivot is zero, whatever the others are: squares of 1 / ω must not overflow.
SMALLEST_PIVOT = 1e-150


@dataclass(frozen=True)
class PivotedFactor:
    """M[:, pivots] = Q R for every head, Q not kept; on the CPU."""

    R: Tensor  # (..., n, n) float64, upper triangular; rows from `rank` on are zero
    pivots: Tensor  # (..., n) int64
    rank: Tensor  # (...) int64, the numerical rank
    device: torch.device  # where the input lay and results go


@dataclass(frozen=True)
class StrongRRQR:
    """Which columns stay, for every head, and how good the choice is."""

    kept: Tensor  # (..., keep) int64, ascending
    order: Tensor  # (..., n) int64, the permutation Π: kept columns first
    swaps: Tensor  # (...) int64, made after column pivoting
    largest_gain: Tensor  # (...) float64, the largest ρ_ij left; 0 where nothing can be swapped
    log_volume: Tensor  # (...) float64, log |det A_k|


def strong_rrqr(matrix: ArrayLike | Tensor, keep: int, f: float = 1.5) -> StrongRRQR:
    """The `keep` columns of `matrix` (..., rows, columns) that no swap betters by more than f.

    `matrix` is tall, or the R factor of one that is, or a batch. f = math.inf leaves column
    pivoting alone; `largest_gain` then says what it missed.
    """
    return strong_swaps(pivoted_qr(matrix), keep, f)


def pivoted_qr(matrix: ArrayLike | Tensor) -> PivotedFactor:
    """Column-pivoted Householder QR of `matrix` (..., rows, columns)."""
    matrix = _float64(matrix, "matrix")
    rows, n = matrix.shape[-2:]
    # Unpivoted QR of the tall part is the faster, and keeps all norms and angles of columns.
    tall = torch.linalg.qr(matrix, mode="r").R.cpu()
    R = torch.zeros(*matrix.shape[:-2], n, n, dtype=torch.float64)
    R[..., : tall.shape[-2], :] = tall
    pivots = torch.empty(R.shape[:-1], dtype=torch.int64)
    for head in np.ndindex(R.shape[:-2]):
        pivoted, order = scipy.linalg.qr(R[head].numpy(), mode="r", pivoting=True)
        R[head], pivots[head] = torch.from_numpy(pivoted), torch.from_numpy(order)
    diagonal = R.diagonal(dim1=-2, dim2=-1).abs()
    zero = (max(rows, n) * EPS * diagonal[..., :1]).clamp(min=SMALLEST_PIVOT)
    rank = (diagonal > zero).cumprod(-1).sum(-1)
    R *= (torch.arange(n) < rank[..., None])[..., None]
    return PivotedFactor(R, pivots, rank, matrix.device)


def pivoted_cholesky(gram: ArrayLike | Tensor) -> PivotedFactor:
    """Diagonally pivoted Cholesky of `gram` = MᵀM (..., columns, columns): it ends with the R
    and the pivots of M's pivoted QR."""
    gram = _float64(gram, "gram")
    n = gram.shape[-1]
    device, gram = gram.device, gram.cpu()
    largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    zero = (n * EPS * largest).clamp(min=SMALLEST_PIVOT**2)
    # LAPACK asks that of every pivot but the first.
    rank = torch.where(largest > zero, n, 0).numpy()

    G = gram.numpy()
    # LAPACK's columns are numpy's rows: what is filled is L = Rᵀ.
    L = np.empty(G.shape)
    pivots = np.empty(G.shape[:-1], dtype=np.int64)
    for head in np.ndindex(rank.shape):
        R, pivots[head], r, _ = dpstrf(G[head].T, tol=zero[head].item())
        rank[head] = min(r, rank[head])
        R[rank[head] :, rank[head] :] = 0
        L[head] = R.T
    R = torch.from_numpy(L).tril_().mT
    return PivotedFactor(R, torch.from_numpy(pivots - 1), torch.from_numpy(rank), device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For many small problems: threads would wait for one another longer than they work, and
    their number would decide the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def strong_swaps(factor: PivotedFactor, keep: int, f: float = 1.5) -> StrongRRQR:
    """From column pivoting on: swaps until no gain exceeds f (Gu and Eisenstat's algorithm 4)."""
    n = factor.R.shape[-1]
    if not (1 <= keep <= n and f >= 1):
        raise InputError(f"keep {keep} of {n} columns, f {f}: keep in 1..{n} and f >= 1 are needed")
    batch = factor.rank.shape
    L, pivots = factor.R.mT.reshape(-1, n, n), factor.pivots.reshape(-1, n)
    independent = factor.rank.flatten().clamp(max=keep)

    order = torch.arange(n).repeat(len(L), 1)
    swaps = torch.zeros(len(L), dtype=torch.int64)
    gain = torch.zeros(len(L), dtype=torch.float64)
    log_volume = torch.zeros_like(gain)
    for k in independent.unique().tolist():
        heads = (independent == k).nonzero().squeeze(-1)
        if k:
            swapped = _swap_until_strong(L[heads].mT, k, f)
            order[heads], swaps[heads], gain[heads], log_volume[heads] = swapped
        order[heads] = pivots[heads].gather(-1, order[heads])
        if k < keep:
            order[heads, k:] = order[heads, k:].sort().values
            log_volume[heads] = -math.inf

    kept = order[:, :keep].sort().values
    parts = (kept, order, swaps, gain, log_volume)
    return StrongRRQR(*(p.reshape(batch + p.shape[1:]).to(factor.device) for p in parts))


def _swap_until_strong(R: Tensor, k: int, f: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Π, swaps, largest gain and log |det A_k| of R (heads, n, n), every head of rank k at least.

    R is refactored after each swap. A head goes on while a gain exceeds f and its volume really
    rose, so every head ends, however rounding falls: no order comes twice.
    """
    heads, n = R.shape[:2]
    order = torch.arange(n).repeat(heads, 1)
    swaps = torch.zeros(heads, dtype=torch.int64)
    log_volume, gain, i, j = _measure(R, k)
    going = torch.arange(heads)
    on = gain > f * (1 + ROUNDING)
    while on.any():
        going, i, j = going[on], i[on], k + j[on]
        trial, rows = order[going], torch.arange(len(going))
        trial[rows, i], trial[rows, j] = trial[rows, j], trial[rows, i]
        columns = trial[:, None].expand(-1, n, -1)
        refactored = torch.linalg.qr(R[going].gather(-1, columns), mode="r").R
        volume, gain_now, i, j = _measure(refactored, k)
        rose = volume > log_volume[going]
        better = going[rose]
        order[better], log_volume[better] = trial[rose], volume[rose]
        gain[better] = gain_now[rose]
        swaps[better] += 1
        on = rose & (gain_now > f * (1 + ROUNDING))
    return order, swaps, gain, log_volume


def _measure(R: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log |det A_k|, and the largest gain ρ_ij (Gu and Eisenstat's lemma 3.1) with its i and j."""
    A, B, C = R[:, :k, :k], R[:, :k, k:], R[:, k:, k:]
    log_volume = A.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    if not B.shape[-1]:
        return log_volume, torch.zeros(len(R), dtype=R.dtype), torch.zeros(0), torch.zeros(0)
    inverse = torch.linalg.solve_triangular(A, torch.eye(k).to(A).expand_as(A), upper=True)
    second = inverse.norm(dim=-1)[:, :, None] * C.norm(dim=-2)[:, None, :]
    rho_squared, place = ((inverse @ B).square() + second.square()).flatten(1).max(-1)
    return log_volume, rho_squared.sqrt(), place // C.shape[-1], place % C.shape[-1]


def _float64(values: ArrayLike | Tensor, name: str) -> Tensor:
    """As (..., rows, columns) in float64, on its device, finite in every head."""
    tensor = torch.as_tensor(values).detach().to(torch.float64)
    # The norm of a head shows NaN, infinity, and numbers whose squares are infinite.
    bad = ~torch.linalg.vector_norm(tensor, dim=(-2, -1)).isfinite()
    if bad.any():
        head = tuple(bad.nonzero()[0].tolist())
        of = f" of head {head}" if head else ""
        raise InputError(f"{name}{of} holds NaN, infinity or numbers beyond 1e150")
    return tensor
