"""DeltaNet, Gated DeltaNet and Kimi Delta Attention written out: slow and obvious, to compare with.

It reads a model's own parameters by name, one sequence at a time and one token at a time, so that
autograd gives gradients of the same parameters through none of the same code.
"""

import torch
import torch.nn.functional as F


def plain_logits(model, ids, seen=lambda layer, x, q, k: None):
    """ids: (T,) to logits: (T, vocabulary).

    `seen` is shown each mixer's input x (T, hidden) and its raw queries and keys (T, heads, d_k).
    """
    config, p = model.config, dict(model.named_parameters())
    x = p["model.embeddings.weight"][ids]  # (T, hidden)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        w = {name.removeprefix(at): tensor for name, tensor in p.items() if name.startswith(at)}
        h = norm(x, w["attn_norm.weight"], config.norm_eps)
        seen(layer, h, *queries_and_keys(config, w, h))
        x = x + mixer(config, w, h)
        h = norm(x, w["mlp_norm.weight"], config.norm_eps)
        h = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        x = x + h @ w["mlp.down_proj.weight"].T
    head = p.get("lm_head.weight", p["model.embeddings.weight"])
    return norm(x, p["model.norm.weight"], config.norm_eps) @ head.T


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def queries_and_keys(config, w, x):
    return [projected(w, x, n).view(len(x), config.num_heads, -1) for n in "qk"]


def projected(w, x, n):
    filters, bias = w[f"attn.{n}_conv1d.weight"], w.get(f"attn.{n}_conv1d.bias", 0)
    return convolved(x @ w[f"attn.{n}_proj.weight"].T, filters, bias)


def states(config, w, x):
    """S_t of each value head, d_v x d_k as in the paper: (T, heads, d_v, d_k); and its queries."""
    T, heads = len(x), config.num_heads
    q, k = (
        z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in queries_and_keys(config, w, x)
    )
    v = projected(w, x, "v")
    value_heads = getattr(config, "num_v_heads", None) or heads
    q, k = (z.repeat_interleave(value_heads // heads, 1) for z in (q, k))
    v = v.view(T, value_heads, -1)
    beta = torch.sigmoid(x @ w["attn.b_proj.weight"].T)  # (T, heads)
    decay = torch.ones_like(beta)[..., None]  # (T, heads, 1 or d_k)
    if "attn.A_log" in w:
        if "attn.a_proj.weight" in w:
            a = x @ w["attn.a_proj.weight"].T + w["attn.dt_bias"]
        else:
            a = x @ w["attn.f_proj.0.weight"].T @ w["attn.f_proj.1.weight"].T + w["attn.dt_bias"]
        a, rate = a.view(T, value_heads, -1), w["attn.A_log"].exp()[:, None]
        bound = getattr(config, "lower_bound", None)
        decay = torch.exp(bound * torch.sigmoid(rate * a) if bound else -rate * F.softplus(a))

    S = [x.new_zeros(value_heads, v.shape[-1], k.shape[-1])]
    for t in range(T):
        faded = decay[t, :, None] * S[-1]
        error = v[t] - torch.einsum("hvk,hk->hv", faded, k[t])
        S.append(faded + beta[t, :, None, None] * torch.einsum("hv,hk->hvk", error, k[t]))
    return torch.stack(S[1:]), q


def mixer(config, w, x):
    S, q = states(config, w, x)
    o = torch.einsum("thvk,thk->thv", S, q) * q.shape[-1] ** -0.5
    o = norm(o, w["attn.o_norm.weight"], config.norm_eps)
    if "attn.g_proj.0.weight" in w:
        gate = x @ w["attn.g_proj.0.weight"].T @ w["attn.g_proj.1.weight"].T
        o = o * (gate + w["attn.g_proj.1.bias"]).sigmoid().view_as(o)
    elif config.use_gate:
        sigmoid = getattr(config, "output_gate_activation", "") == "sigmoid"
        o = o * (torch.sigmoid if sigmoid else F.silu)(x @ w["attn.g_proj.weight"].T).view_as(o)
    return o.flatten(1) @ w["attn.o_proj.weight"].T


def convolved(x, filters, bias):
    """x: (T, channels); filters: (channels, 1, W), or fewer that neighbouring channels share."""
    filters = filters[:, 0].repeat_interleave(x.shape[1] // len(filters), 0)
    W = filters.shape[1]
    padded = torch.cat([x.new_zeros(W - 1, x.shape[1]), x])
    return F.silu(sum(padded[i : i + len(x)] * filters[:, i] for i in range(W)) + bias)
