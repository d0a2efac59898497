"""fla's kernels in plain PyTorch, with the signatures that its layers call.

They take the kernels' places where there is no GPU (`statecut.models.fixes.fla`), and are what the
preflight compares a GPU's kernels with. Everything is computed in float32 (or float64, if that is
what comes in) and given back in the input's type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statecut.models.delta_rule import (
    chunked_delta_rule,
    l2_normalised,
    log_decay,
    recurrent_delta_rule,
    wide,
)


class Packed:
    """Sequences of several lengths in one row, spread out to a batch of rows as long as the longest
    of them, and back. Without `cu_seqlens`, where each begins and ends, nothing is changed."""

    def __init__(self, cu_seqlens: Tensor | None):
        self.filled: Tensor | None = None
        if cu_seqlens is not None:
            self.lengths = cu_seqlens.diff().long()
            columns = torch.arange(int(self.lengths.max()), device=self.lengths.device)
            self.filled = columns < self.lengths[:, None]  # (N, longest)

    def spread(self, x: Tensor) -> Tensor:
        """(1, tokens, ...) to (N, longest, ...), zeros where a row has ended."""
        if self.filled is None:
            return x
        rows = x.new_zeros(*self.filled.shape, *x.shape[2:])
        rows[self.filled] = x[0]
        return rows

    def pack(self, rows: Tensor) -> Tensor:
        return rows if self.filled is None else rows[self.filled][None]


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
    A_log: Any = None,
    dt_bias: Any = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """For fla's (gated) delta rules, chunked or fused and recurrent. Shapes as their kernels have
    them: (B, T, H, ...); the state (N, H, d_k, d_v), or (N, H, d_v, d_k) if `state_v_first`."""
    dtype = v.dtype
    q, k, v, beta = wide(q), wide(k), wide(v), wide(beta)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    g = torch.zeros_like(beta) if g is None else wide(g)
    if use_gate_in_kernel:
        g = log_decay(g, A_log, dt_bias)
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalised(q), l2_normalised(k)
    if v.shape[2] > q.shape[2]:  # several value heads to one key head
        q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    packed = Packed(cu_seqlens)
    q, k, v, beta, g = (packed.spread(x) for x in (q, k, v, beta, g))
    if initial_state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    else:
        state = (initial_state.mT if state_v_first else initial_state).to(v.dtype)
    rule = chunked_delta_rule if g.ndim == 3 else recurrent_delta_rule
    o, state = rule(q, k, v, beta, g, scale or k.shape[-1] ** -0.5, state)
    o = packed.pack(o).to(dtype)
    if not output_final_state:
        return o, None
    return o, state.mT.contiguous() if state_v_first else state


def kda(
    *,
    g: Tensor,
    A_log: Any = None,
    dt_bias: Any = None,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """For fla's Kimi Delta Attention: the same with a decay for each channel, g (B, T, H, d_k)."""
    if use_gate_in_kernel:
        x, rate = wide(g) + wide(dt_bias).view(g.shape[-2:]), wide(A_log).exp()[:, None]
        g = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return delta_rule(g=g, **rest)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **of_kernels: Any,
) -> tuple[Tensor, Tensor | None]:
    """x: (B, T, D), weight: (D, W). The state (N, D, W) is the last W inputs, oldest first."""
    packed = Packed(cu_seqlens)
    rows = packed.spread(x)
    N, T, D = rows.shape
    W = weight.shape[1]
    past = rows.new_zeros(N, W, D) if initial_state is None else initial_state.mT.to(rows.dtype)
    inputs = wide(torch.cat([past, rows], 1))  # (N, W + T, D)
    y = inputs[:, 1 : 1 + T] * wide(weight[:, 0])
    for i in range(1, W):
        y = torch.addcmul(y, inputs[:, i + 1 : i + 1 + T], wide(weight[:, i]))
    if bias is not None:
        y = y + wide(bias)
    if activation is not None:
        y = F.silu(y)
    y = packed.pack(y).to(x.dtype)
    if not output_final_state:
        return y, None
    ends = torch.full((N,), T, device=x.device) if packed.filled is None else packed.lengths
    last = ends[:, None] + torch.arange(W, device=x.device)  # a row's last W of W + length inputs
    state = inputs[torch.arange(N, device=x.device)[:, None], last].mT
    return y, state.to(x.dtype).contiguous()


def causal_conv1d_update(
    x: Tensor, cache: Tensor, residual: None = None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """One new token for each of N sequences: x is (N, 1, D) or, packed, (1, N, D)."""
    rows = x.reshape(-1, 1, x.shape[-1])
    y, state = causal_conv1d(rows, initial_state=cache, output_final_state=True, **given)
    return y.reshape(x.shape), state


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
    y = y if weight is None else y * weight
    y = (y if bias is None else y + bias).to(x.dtype)
    if not prenorm:
        return y
    kept = total.dtype if residual_in_fp32 else x.dtype
    return y, total.to(kept if residual is None else residual.dtype)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-6,
    **of_residuals: Any,
) -> Tensor:
    assert not any(of_residuals.values())
    y = rms_norm(wide(x), weight, bias, eps=eps)
    assert isinstance(y, Tensor)
    return (y * (torch.sigmoid if activation == "sigmoid" else F.silu)(wide(g))).to(x.dtype)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return (F.silu(wide(x)) * y).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y), weight, bias)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Takes and leaves aside an option that only concerns a kernel's memory."""

    def __init__(self, reduction: str = "mean", inplace_backward: bool = False, **rest: bool):
        assert not any(rest.values()), f"{rest} needs the Triton kernels of a GPU"
        super().__init__(reduction=reduction)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().forward(wide(logits), target)


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """The loss straight from hidden states."""

    def forward(self, hidden: Tensor, target: Tensor, *linear: Any) -> Tensor:
        return super().forward(F.linear(hidden.flatten(0, -2), *linear), target.flatten())


# Where all of fla's models look them up; adapters have those of their own layers.
FLA: dict[tuple[str, str], Callable[..., Any]] = {
    ("fla.modules.causal_conv1d.ops", "causal_conv1d"): causal_conv1d,
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_update"): causal_conv1d_update,
    ("fla.modules.norm.layernorm", "rms_norm"): rms_norm,
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"): rms_norm_gated,
    ("fla.modules.mlp", "swiglu"): swiglu,
    ("fla.modules.mlp", "swiglu_linear"): swiglu_linear,
    ("fla.models.modeling_utils", "FusedCrossEntropyLoss"): CrossEntropyLoss,
    ("fla.models.modeling_utils", "FusedLinearCrossEntropyLoss"): LinearCrossEntropyLoss,
}
