"""The preflight of one shape, in a process of its own: its kernels against the fp32 recurrence.

First the forward and backward pass with the tiles that the tuner chose, then with each of the
others, since a run at another size may choose those; then a whole layer against the same layer in
fp32. Where architectures call a rule with other options, the worse of both counts.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from reproduction.benchmarking.machine import default_device, machine
from reproduction.benchmarking.tuning import of_a_rule, tuners
from torch import Tensor

from statecut.models import kernels
from statecut.models.architectures import ARCHITECTURES, RULES
from statecut.models.architectures.base import DeltaRule
from statecut.models.delta_rule import l2_normalised, recurrent_delta_rule
from statecut.models.fixes import fla, triton
from statecut.models.shapes import Shape
from statecut.preflight.random_models import random_layer, relative_error

HIDDEN = 256
CPU_HEADS = 2  # a CPU's recurrence would take long

Errors = dict[str, float]  # relative ones, by what they are of


def examine(shape: Shape, length: int, device: str | None = None) -> Iterator[tuple[str, Any]]:
    """The machine, then the errors of each part, by name: a part that is missing did not end."""
    device = device or default_device()
    if device == "cpu":
        values = CPU_HEADS * shape.value_heads // shape.heads
        shape = replace(shape, heads=CPU_HEADS, value_heads=values)
    yield "machine", machine(device)
    kernels.prepare()
    for tuner in tuners():
        triton.skip_timing(tuner)
        if not of_a_rule(tuner):  # filters and norms: not in question, so not searched
            tuner.configs = tuner.configs[:1]
    torch.manual_seed(0)
    inputs = _inputs(shape, length, device)
    upstream = torch.randn_like(inputs["v"])
    low, high = _types(device)
    exact_o, exact = _gradients(_recurrence, inputs, upstream, high)
    rules = [_kernel(RULES[shape.kernel], options, device) for options in call_options(shape)]
    with torch.no_grad():
        yield "forward", {"o": _worst(relative_error(rule(**inputs), exact_o) for rule in rules)}

    def errors() -> Errors:
        ways = []
        for rule in rules:
            o, gradients = _gradients(rule, inputs, upstream, low)
            ways.append({"o": relative_error(o, exact_o), **_errors(gradients, exact)})
        return {name: _worst(way[name] for way in ways) for name in ways[0]}

    yield "backward", errors()
    yield "tiles", dict(over_all_tiles(lambda: _worst(errors().values())))
    yield from _examine_layer(shape, length, device)


def call_options(shape: Shape) -> list[Mapping[str, Any]]:
    """What layers with rules of that shape call them with, each once."""
    calls = [
        kind.call
        for kind in ARCHITECTURES.values()
        if kind.rule
        and kind.rule.name == shape.kernel
        # Where keys are repeated, there are as many heads of them as of values.
        and (not kind.call.repeated or shape.heads == shape.value_heads)
    ]
    return [dict(items) for items in dict.fromkeys(tuple(c.options.items()) for c in calls)]


def _worst(errors: Iterable[float]) -> float:
    return max(errors, key=lambda error: math.inf if error != error else error)


def _errors(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> Errors:
    return {f"d{name}": relative_error(gradients[name], exact[name]) for name in exact}


def _types(device: str) -> tuple[torch.dtype, torch.dtype]:
    """What is checked, and what it is checked against: one type higher."""
    return (torch.float32, torch.float64) if device == "cpu" else (torch.bfloat16, torch.float32)


def _inputs(shape: Shape, length: int, device: str) -> dict[str, Tensor]:
    """q, k (B, T, H, d_k), v (B, T, V, d_v), beta and, gated, g (B, T, V), as layers make them,
    with H heads of keys and V of values."""
    B = 2 if device == "cuda" else 1

    def draw(*each: int) -> Tensor:
        return torch.randn(B, length, *each, device=device)

    inputs = {
        "q": F.silu(draw(shape.heads, shape.width)),
        "k": F.silu(draw(shape.heads, shape.width)),
        "v": F.silu(draw(shape.value_heads, shape.value_width)),
        "beta": draw(shape.value_heads).sigmoid(),
    }
    low, _ = _types(device)
    inputs = {name: x.to(low) for name, x in inputs.items()}
    if RULES[shape.kernel].gated:
        # In fp32, as the gate is; decays of 0.5 to 1.
        inputs["g"] = F.logsigmoid(draw(shape.value_heads) + 3)
    return inputs


def _kernel(rule: DeltaRule, options: Mapping[str, Any], device: str) -> Callable[..., Tensor]:
    """The chunked rule under test: o (B, T, H, d_v) from the inputs by name."""
    if device == "cpu":
        chunked = next(f for (_, name), f in fla.cpu_fallbacks().items() if name == rule.chunked)
    else:
        chunked = getattr(importlib.import_module("fla.ops"), rule.chunked)
    return lambda **inputs: chunked(**inputs, use_qk_l2norm_in_kernel=True, **options)[0]


def _recurrence(**inputs: Tensor) -> Tensor:
    """The same, one token after another."""
    v, beta = inputs["v"], inputs["beta"]
    # Each key head serves several value heads, if there are more of those.
    q, k = (
        l2_normalised(inputs[name]).repeat_interleave(v.shape[2] // inputs[name].shape[2], 2)
        for name in "qk"
    )
    g = inputs.get("g", beta.new_zeros(beta.shape))
    B, _, H, d_k = q.shape
    state = v.new_zeros(B, H, d_k, v.shape[-1])
    return recurrent_delta_rule(q, k, v, beta, g, d_k**-0.5, state)[0]


def _gradients(
    rule: Callable[..., Tensor], inputs: dict[str, Tensor], upstream: Tensor, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Any]]:
    """Output and gradients, all inputs of that type; a gate is never below fp32."""
    leaves = {
        name: x.to(torch.promote_types(x.dtype, dtype)).detach().clone().requires_grad_()
        for name, x in inputs.items()
    }
    o = rule(**leaves)
    o.backward(upstream.to(o.dtype))
    return o.detach(), {name: x.grad for name, x in leaves.items()}


def over_all_tiles(worst: Callable[[], float]) -> Iterator[tuple[str, float]]:
    """Of each tuned kernel that ran, the largest error that any tile it may choose leads to."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    for tuner in list(tuners()):
        if not tuner.cache:
            continue
        chosen, largest = dict(tuner.cache), 0.0
        for config in tuner.configs:
            tuner.cache.update(dict.fromkeys(chosen, config))
            try:
                error = worst()
            except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
                continue  # the tuner passes over these too
            largest = error if error != error else max(largest, error)
        tuner.cache.update(chosen)
        yield tuner.base_fn.__name__, largest


def _examine_layer(shape: Shape, length: int, device: str) -> Iterator[tuple[str, Errors]]:
    low, high = _types(device)
    layer = random_layer(
        shape.kernel,
        hidden_size=HIDDEN,
        num_heads=shape.heads,
        width=shape.width,
        head_v_dim=shape.value_width,
        num_v_heads=shape.value_heads,
        use_gate=RULES[shape.kernel].gated,
        device=device,
        dtype=low,
    ).train()
    exact_layer = copy.deepcopy(layer).to(high)
    x = torch.randn(1, length, HIDDEN, device=device, dtype=low)
    upstream = torch.randn_like(x)
    with fla.plain_kernels_in_place():
        exact_o, exact = _layer_gradients(exact_layer, x.to(high), upstream)
    with torch.no_grad():
        yield "layer_forward", {"o": relative_error(layer(x)[0], exact_o)}
    _, gradients = _layer_gradients(layer, x, upstream)
    yield "layer_backward", _errors(gradients, exact)


def _layer_gradients(layer: Any, x: Tensor, upstream: Tensor) -> tuple[Tensor, dict[str, Any]]:
    x = x.detach().clone().requires_grad_()
    o = layer(x)[0]
    o.backward(upstream.to(o.dtype))
    return o.detach(), {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
