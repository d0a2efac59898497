"""fla's kernels in plain PyTorch, with the signatures that its layers call.

They take the kernels' places where there is no GPU (`statecut.models.fixes.fla`), and are what the
preflight compares a GPU's kernels with. Everything is computed in float32 (or float64, if that is
what comes in) and given back in the input's type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statecut.models.architectures.base import StandIn
from statecut.models.delta_rule import (
    chunked_delta_rule,
    l2_normalised,
    log_decay,
    recurrent_delta_rule,
    wide,
)

# Sequences of several lengths packed into one row: spread out to a batch, and back.


class Packed:
    """The places of packed sequences in a batch of rows as long as the longest of them."""

    def __init__(self, cu_seqlens: Tensor):
        lengths = cu_seqlens.diff().long()
        self.lengths = lengths
        columns = torch.arange(int(lengths.max()), device=lengths.device)
        self.filled = columns < lengths[:, None]  # (N, longest)

    def spread(self, x: Tensor) -> Tensor:
        """(1, tokens, ...) to (N, longest, ...), zeros where a row has ended."""
        rows = x.new_zeros(*self.filled.shape, *x.shape[2:])
        rows[self.filled] = x[0]
        return rows

    def pack(self, rows: Tensor) -> Tensor:
        return rows[self.filled][None]


# The delta rules


def delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """For fla's (gated) delta rules, chunked or fused and recurrent. Shapes as their kernels have
    them: (B, T, H, ...); the state (N, H, d_k, d_v), or (N, H, d_v, d_k) if `state_v_first`."""
    dtype = v.dtype
    q, k, v, beta = wide(q), wide(k), wide(v), wide(beta)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if g is None:
        g = torch.zeros_like(beta)
    elif use_gate_in_kernel:
        assert A_log is not None
        assert dt_bias is not None
        g = log_decay(g, A_log, dt_bias)
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalised(q), l2_normalised(k)
    if v.shape[2] > q.shape[2]:  # several value heads to one key head
        q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    packed = Packed(cu_seqlens) if cu_seqlens is not None else None
    g = wide(g)
    if packed is not None:
        q, k, v, beta, g = (packed.spread(x) for x in (q, k, v, beta, g))
    if initial_state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    else:
        state = (initial_state.mT if state_v_first else initial_state).to(v.dtype)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    rule = chunked_delta_rule if g.ndim == 3 else recurrent_delta_rule
    o, state = rule(q, k, v, beta, g, scale, state)
    if packed is not None:
        o = packed.pack(o)
    if not output_final_state:
        return o.to(dtype), None
    return o.to(dtype), state.mT.contiguous() if state_v_first else state


def kda(
    *,
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    use_gate_in_kernel: bool,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """For fla's Kimi Delta Attention: the same with a decay for each channel, g (B, T, H, d_k)."""
    assert use_gate_in_kernel
    x, rate = wide(g) + wide(dt_bias).view(g.shape[-2:]), wide(A_log).exp()[:, None]
    decay = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return delta_rule(g=decay, **rest)


# The causal convolution


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str = "triton",
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x: (B, T, D), weight: (D, W). The state (N, D, W) is the last W inputs, oldest first."""
    packed = Packed(cu_seqlens) if cu_seqlens is not None else None
    rows = packed.spread(x) if packed is not None else x
    N, T, D = rows.shape
    W = weight.shape[1]
    past = rows.new_zeros(N, W, D) if initial_state is None else initial_state.mT.to(rows.dtype)
    whole = wide(torch.cat([past, rows], 1))  # (N, W + T, D)
    y = whole[:, 1 : 1 + T] * wide(weight[:, 0])
    for i in range(1, W):
        y = torch.addcmul(y, whole[:, i + 1 : i + 1 + T], wide(weight[:, i]))
    if bias is not None:
        y = y + wide(bias)
    if activation is not None:
        y = F.silu(y)
    if packed is not None:
        y = packed.pack(y)
    if residual is not None:
        y = y + residual
    if not output_final_state:
        return y.to(x.dtype), None
    ends = packed.lengths if packed is not None else torch.full((N,), T, device=x.device)
    last = ends[:, None] + torch.arange(W, device=x.device)  # a row's last W of W + length inputs
    state = whole[torch.arange(N, device=x.device)[:, None], last].mT
    return y.to(x.dtype), state.to(x.dtype).contiguous()


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One new token for each of N sequences: x is (N, 1, D) or, packed, (1, N, D)."""
    assert weight is not None
    rows = x.reshape(-1, 1, x.shape[-1])
    y, state = causal_conv1d(
        rows, weight, bias, None, cache, output_final_state=True, activation=activation
    )
    assert state is not None
    y = y.reshape(x.shape)
    return y if residual is None else y + residual, state


# Norms, activations, losses


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    total = wide(x) if residual is None else wide(x) + wide(residual)
    y = total * (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    if not prenorm:
        return y.to(x.dtype)
    if residual is not None:
        kept = total.to(residual.dtype)
    else:
        kept = total if residual_in_fp32 else total.to(x.dtype)
    return y.to(x.dtype), kept


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    normed = rms_norm(wide(x), weight, bias, residual, eps, prenorm, residual_in_fp32)
    y = normed[0] if isinstance(normed, tuple) else normed
    y = (y * (torch.sigmoid if activation == "sigmoid" else F.silu)(wide(g))).to(x.dtype)
    return (y, normed[1].to(x.dtype)) if isinstance(normed, tuple) else y


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return (F.silu(wide(x)) * y).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y), weight, bias)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Takes and leaves aside the option that only concerns a kernel's memory."""

    def __init__(self, reduction: str = "mean", inplace_backward: bool = False):
        super().__init__(reduction=reduction)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().forward(wide(logits), target)


class LinearCrossEntropyLoss(nn.Module):
    """The loss straight from hidden states, a slice of tokens at a time, so that the logits of a
    whole batch never exist at once."""

    ignore_index = -100
    tokens_at_once = 1024

    def __init__(self, reduction: str = "mean", use_l2warp: bool = False):
        super().__init__()
        if use_l2warp:
            raise NotImplementedError("use_l2warp needs the Triton kernels of a GPU")
        self.reduction = reduction

    def forward(
        self, hidden: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        total = hidden.new_zeros((), dtype=torch.float32)
        for part, part_target in zip(
            hidden.split(self.tokens_at_once), target.split(self.tokens_at_once), strict=True
        ):
            total = total + torch.utils.checkpoint.checkpoint(
                self._loss, part, part_target, weight, bias, use_reentrant=False
            )
        return total / (target != self.ignore_index).sum() if self.reduction == "mean" else total

    @staticmethod
    def _loss(hidden: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.cross_entropy(wide(F.linear(hidden, weight, bias)), target, reduction="sum")


# Where all of fla's models look them up; adapters have those of their own layers.
FLA: list[StandIn] = [
    ("fla.modules.causal_conv1d.ops", "causal_conv1d", causal_conv1d),
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_update", causal_conv1d_update),
    ("fla.modules.norm.layernorm", "rms_norm", rms_norm),
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated", rms_norm_gated),
    ("fla.modules.mlp", "swiglu", swiglu),
    ("fla.modules.mlp", "swiglu_linear", swiglu_linear),
    ("fla.models.modeling_utils", "FusedCrossEntropyLoss", CrossEntropyLoss),
    ("fla.models.modeling_utils", "FusedLinearCrossEntropyLoss", LinearCrossEntropyLoss),
]
