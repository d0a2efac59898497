"""What transformers' hybrids of gated delta rules and softmax attention have in common."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from statecut.errors import InputError
from statecut.models.architectures import base
from statecut.models.architectures.base import ChannelTensor

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


def shape(config: base.Config) -> base.MixerShape:
    text = base.text_config(config)
    heads, value_heads, width, value_width = (
        base.need(text, f"linear_{key}")
        for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    if value_heads % heads:
        raise InputError(
            f"linear_num_value_heads {value_heads} must be a multiple of linear_num_key_heads "
            f"{heads}"
        )
    return base.MixerShape(delta_layers(text), heads, width, value_heads, value_width)


def delta_layers(text: base.Config) -> tuple[int, ...]:
    count, kinds = base.need(text, "num_hidden_layers"), text.get("layer_types")
    if kinds is None:  # transformers' default: the last of every few layers is softmax attention
        kinds = layer_types(count, text.get("full_attention_interval", 4))
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    if len(kinds) != count or not layers:
        raise InputError(
            f"layer_types has {len(kinds)} entries, {len(layers)} of them 'linear_attention': "
            f"it must have {count}, and at least one of these"
        )
    return layers


def layer_types(count: int, every: int) -> list[str]:
    """With softmax attention in the last of every few layers."""
    return ["full_attention" if i % every == 0 else "linear_attention" for i in range(1, count + 1)]


def softmax(config: base.Config, shape: base.MixerShape) -> tuple[base.SoftmaxLayers, ...]:
    text = base.text_config(config)
    layers = text["num_hidden_layers"] - len(shape.layers)
    heads = base.need(text, "num_attention_heads")
    width = text.get("head_dim") or base.need(text, "hidden_size") // heads
    every = text.get("num_key_value_heads", 0) is None  # as OLMo Hybrid says it
    keys = heads if every else base.need(text, "num_key_value_heads")
    return (base.SoftmaxLayers(layers, keys, width),) if layers else ()


def taps(config: base.Config) -> int:
    return base.text_config(config).get("linear_conv_kernel_dim", 4)


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    values = {"linear_value_head_dim": value_width} if value_width else {}
    kinds, interval = base.text_config(config).get("layer_types") or [], {}
    if "full_attention" in kinds:
        every = kinds.index("full_attention") + 1
        if kinds == layer_types(len(kinds), every):
            # SGLang reads this instead of layer_types; transformers 5 does not save it.
            interval = {"full_attention_interval": every}
    return base.with_text(config, {"linear_key_head_dim": width, **values, **interval})


def in_pytorch(module: str, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """transformers' own functions in PyTorch, around which it may have put faster kernels."""
    functions = {name: getattr(import_module(module), name) for name in names}
    return {name: inspect.unwrap(function) for name, function in functions.items()}


def options(name: str, rules: tuple[str, ...] = RULES) -> dict[str, Any]:
    """Of an Architecture: what follows from the name of transformers' module."""
    module = f"transformers.models.{name}.modeling_{name}"
    return {
        "call": base.Call(module, rules, by_position=("q", "k", "v")),
        "shape": shape,
        "resized": resized,
        "softmax": softmax,
        "taps": taps,
        "cpu_fallbacks": partial(in_pytorch, module, (*rules, *CONVOLUTIONS)),
        "options": ("layer_types", "linear_conv_kernel_dim", "num_attention_heads",
                    "num_key_value_heads", "head_dim"),
        "library": "transformers",
        "passthrough": ("mtp.",),
        "mixer": "model.layers.{layer}.linear_attn.",
        "eps_key": "rms_norm_eps",
        "layer_output": lambda hidden: hidden,
    }  # fmt: skip


def _behind(parts: int) -> Callable[[base.MixerShape, base.Channels], np.ndarray]:
    """By head, behind so many parts of the size that the queries of all heads have."""
    return lambda shape, channels: base.by_head(shape, channels) + parts * shape.heads * shape.width


def queries_keys_values(name: str, role: base.Role) -> tuple[ChannelTensor, ...]:
    """Of a tensor with the queries of all heads, then the keys of all, then the values."""
    return (
        ChannelTensor(name, role),
        ChannelTensor(name, role, layout=_behind(1)),
        ChannelTensor(name, role, "value", layout=_behind(2)),
    )


JOINT = queries_keys_values("conv1d.weight", "filter")
# Where files have them apart: theirs, and the one in memory.
KEY_FILTERS = (*(ChannelTensor(f"{side}_conv1d.weight", "filter") for side in "qk"), *JOINT[:2])
VALUE_FILTERS = (ChannelTensor("v_conv1d.weight", "filter", "value"), JOINT[2])


def join_filters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The filters of a layer's queries, keys and values in one tensor: files have them apart."""
    import torch

    result = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.)([qkv])_conv1d\.weight", name)
        if not match:
            result[name] = tensor
        elif match[2] == "q":
            names = [f"{match[1]}{side}_conv1d.weight" for side in "qkv"]
            if all(name in tensors for name in names):
                result[f"{match[1]}conv1d.weight"] = torch.cat([tensors[name] for name in names])
    return result


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of a layer's experts in one tensor: files may have them apart."""
    import torch

    result: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            result[name] = tensor
    for at, parts in experts.items():
        if len({frozenset(matrices) for matrices in parts.values()}) > 1 or "down" not in parts:
            continue  # what is missing is said by whoever needs it
        stacks = {
            part: torch.stack([matrices[number] for number in sorted(matrices)])
            for part, matrices in parts.items()
        }
        if "gate" in stacks:
            stacks["gate_up"] = torch.cat([stacks.pop("gate"), stacks.pop("up")], 1)
        result |= {f"{at}{part}_proj": stack for part, stack in stacks.items()}
    return result
