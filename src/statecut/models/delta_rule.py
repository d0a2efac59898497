"""The (gated) delta rule in plain PyTorch: the recurrence as it is defined, and a chunked form.

Per head, with the state S (d_k x d_v here; the paper writes its transpose) and a_t = exp(g_t):

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - a_t S_{t-1}^T k_t),   o_t = scale S_t^T q_t

Without a gate g = 0 and this is the paper's equation (4). Keys and queries come in as the rule
uses them, already normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
L2_EPS = 1e-6  # as in fla's kernels


def l2_normalised(x: Tensor) -> Tensor:
    """Keys or queries (..., d_k) at length one, as the kernels make them."""
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def wide(x: Tensor) -> Tensor:
    """In float32, or as wide as it is."""
    return x if x.dtype == torch.float64 else x.float()


@contextmanager
def no_tf32() -> Iterator[None]:
    """No TF32 in float32 products, whatever the process has set: it has three digits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Gated DeltaNet's gate: g = -e^A softplus(x + bias), the logarithm of the decay a_t."""
    return -wide(A_log).exp() * F.softplus(wide(g) + wide(dt_bias))


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One step per token: slow and obvious. Shapes as in `chunked_delta_rule`, but that g may have
    d_k numbers for each token and head: a decay for each channel."""
    outputs = []
    for t in range(q.shape[1]):
        decay = g[:, t, :, None].exp() if g.ndim == 3 else g[:, t].exp()  # (B, H, 1 or d_k)
        state = state * decay[..., None]
        recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        u = beta[:, t, :, None] * (v[:, t] - recalled)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same map, a chunk of tokens at a time.

    q, k: (B, T, H, d_k); v: (B, T, H, d_v); beta, g: (B, T, H); state: (B, H, d_k, d_v).
    Returns o: (B, T, H, d_v) and the last state.

    Inside a chunk that starts from S_0, with G the running sum of g, the u_i solve the unit
    lower triangular system  u_i + beta_i sum_{j<i} e^(G_i-G_j) (k_i . k_j) u_j
    = beta_i (v_i - e^(G_i) S_0^T k_i): one solve for all chunks, then one pass over the chunks.
    """
    T = q.shape[1]
    chunk = min(CHUNK, T)
    q, k, v, beta, g = (_split(x, chunk) for x in (q, k, v, beta, g))  # (B, H, N, C, ...)

    G = g.cumsum(-1)  # (B, H, N, C)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    # -inf before the exponential: above the diagonal e^(G_i-G_j) may overflow.
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(later, float("-inf")).exp()

    kk = beta[..., None] * (k @ k.mT) * decay  # (B, H, N, C, C)
    right = torch.cat([beta[..., None] * v, (beta * G.exp())[..., None] * k], -1)
    # `unitriangular` ignores the diagonal, so the system is I + strictly lower part.
    solved = torch.linalg.solve_triangular(kk, right, upper=False, unitriangular=True)
    fresh, carried = solved.split([v.shape[-1], k.shape[-1]], -1)  # u = fresh - carried S_0

    attention = scale * (q @ k.mT) * decay
    queries = scale * G.exp()[..., None] * q
    keys = (G[..., -1:] - G).exp()[..., None] * k
    outputs = []
    for n in range(q.shape[2]):
        u = fresh[:, :, n] - carried[:, :, n] @ state
        outputs.append(queries[:, :, n] @ state + attention[:, :, n] @ u)
        state = G[:, :, n, -1, None, None].exp() * state + keys[:, :, n].mT @ u
    return torch.cat(outputs, 2)[:, :, :T].transpose(1, 2), state


def _split(x: Tensor, chunk: int) -> Tensor:
    """(B, T, H, ...) to (B, H, chunks, chunk, ...), filled up at the end with zeros, which write
    nothing (k = 0, beta = 0) and decay nothing (g = 0)."""
    x = x.transpose(1, 2)
    missing = -x.shape[2] % chunk
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2)
    return x.unflatten(2, (-1, chunk))
