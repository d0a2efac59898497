"""What the plugin for vLLM runs in place of vLLM's preparation of queries, keys and values.

`prepare` says what is computed, `prepare_on_gpu` computes it in one kernel: prompts of few tokens
are common, and a layer would wait for each further launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import softplus

from statecut.models.delta_rule import L2_EPS, l2_normalised

Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
TOKENS = 16  # of one program


def prepare(
    conv_output: Tensor,  # (tokens, 2 heads d_k + value_heads d_v)
    a: Tensor,  # (tokens, value_heads), as b
    b: Tensor,
    A_log: Tensor,  # (value_heads,), as dt_bias
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> Prepared:
    """q, k and v by head, the log of the decay (or the decay) and beta, both float32."""
    keys, values = num_k_heads * head_k_dim, len(A_log) * head_v_dim
    q, k, v = conv_output.split([keys, keys, values], dim=-1)
    q, k = (x.unflatten(-1, (num_k_heads, head_k_dim)).float() for x in (q, k))
    if apply_l2norm:
        q, k = l2_normalised(q), l2_normalised(k)
    g = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return (
        q.to(conv_output.dtype).contiguous(),
        k.to(conv_output.dtype).contiguous(),
        v.unflatten(-1, (len(A_log), head_v_dim)).contiguous(),
        g.exp() if output_g_exp else g,
        b.float().sigmoid(),
    )


def prepare_on_gpu(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> Prepared:
    """What `prepare` returns."""
    tokens, value_heads = a.shape
    qk = conv_output.new_empty(2, tokens, num_k_heads, head_k_dim)
    v = conv_output.new_empty(tokens, value_heads, head_v_dim)
    g, beta = conv_output.new_empty(2, tokens, value_heads, dtype=torch.float32)
    kernel[triton.cdiv(tokens, TOKENS), 2 * num_k_heads + value_heads](
        conv_output, a, b, A_log, dt_bias, qk, v, g, beta,
        tokens, conv_output.stride(0), a.stride(0), b.stride(0), num_k_heads, value_heads,
        D_K=head_k_dim, D_V=head_v_dim, TILE_K=triton.next_power_of_2(head_k_dim),
        TILE_V=triton.next_power_of_2(head_v_dim), TOKENS=TOKENS, EPS=L2_EPS,
        NORMALISE=apply_l2norm, EXP=output_g_exp,
    )  # fmt: skip
    return qk[0], qk[1], v, g, beta


@triton.jit
def kernel(  # type: ignore[no-untyped-def]
    mixed, a, b, A_log, dt_bias, qk, v, g, beta,
    tokens, mixed_stride, a_stride, b_stride, heads, value_heads,
    D_K: tl.constexpr, D_V: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr,
    TOKENS: tl.constexpr, EPS: tl.constexpr, NORMALISE: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """One head of queries, keys or values of some tokens."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    if head < 2 * heads:
        key_channel = tl.arange(0, TILE_K)[None]
        key_mask = (token < tokens)[:, None] & (key_channel < D_K)
        key_place = mixed + token[:, None] * mixed_stride + head * D_K + key_channel
        x = tl.load(key_place, mask=key_mask, other=0.0).to(tl.float32)
        if NORMALISE:
            x /= tl.sqrt(tl.sum(x * x, axis=1) + EPS)[:, None]
        row = (head // heads) * tokens + token[:, None]
        tl.store(qk + (row * heads + head % heads) * D_K + key_channel, x, mask=key_mask)
    else:
        value_head = head - 2 * heads
        channel = tl.arange(0, TILE_V)[None]
        mask = (token < tokens)[:, None] & (channel < D_V)
        place = mixed + token[:, None] * mixed_stride + 2 * heads * D_K + value_head * D_V + channel
        out = (token[:, None] * value_heads + value_head) * D_V + channel
        tl.store(v + out, tl.load(place, mask=mask), mask=mask)
        rate = tl.load(A_log + value_head).to(tl.float32)
        bias = tl.load(dt_bias + value_head).to(tl.float32)
        step = tl.load(a + token * a_stride + value_head, mask=token < tokens, other=0.0)
        z = step.to(tl.float32) + bias
        # log(1 + u), also where u is lost in the sum; beyond 20 the result is z itself.
        u = tl.exp(tl.minimum(z, 20.0))
        w = 1.0 + u
        softplus = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        log_decay = -tl.exp(rate) * tl.where(z > 20.0, z, softplus)
        strength = tl.load(b + token * b_stride + value_head, mask=token < tokens, other=0.0)
        gate = token * value_heads + value_head
        tl.store(g + gate, tl.exp(log_decay) if EXP else log_decay, mask=token < tokens)
        tl.store(beta + gate, tl.sigmoid(strength.to(tl.float32)), mask=token < tokens)
