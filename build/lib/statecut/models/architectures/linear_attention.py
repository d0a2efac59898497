"""What transformers' hybrids of gated delta rules and softmax attention have in common."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from statecut.errors import InputError
from statecut.models.architectures import base
from statecut.models.architectures.base import ChannelTensor

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
OPTIONS = ("layer_types", "linear_conv_kernel_dim", "num_attention_heads", "num_key_value_heads",
           "head_dim")  # fmt: skip


def shape(config: base.Config) -> base.MixerShape:
    text = base.text_config(config)
    heads, value_heads = (base.need(text, f"linear_num_{of}_heads") for of in ("key", "value"))
    if value_heads % heads:
        raise InputError(
            f"linear_num_value_heads {value_heads} must be a multiple of linear_num_key_heads "
            f"{heads}"
        )
    return base.MixerShape(
        layers=delta_layers(text),
        heads=heads,
        width=base.whole(base.need(text, "linear_key_head_dim"), "linear_key_head_dim"),
        value_heads=value_heads,
        value_width=base.whole(base.need(text, "linear_value_head_dim"), "linear_value_head_dim"),
    )


def delta_layers(text: base.Config) -> tuple[int, ...]:
    count, kinds = base.need(text, "num_hidden_layers"), text.get("layer_types")
    if kinds is None:  # transformers' default: the last of every few layers is softmax attention
        interval = text.get("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "" for i in range(count)]
    if len(kinds) != count:
        raise InputError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {count}")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    if not layers:
        raise InputError("layer_types has no 'linear_attention': no layer has a delta rule")
    return layers


def softmax(config: base.Config, shape: base.MixerShape) -> tuple[base.SoftmaxLayers, ...]:
    text = base.text_config(config)
    layers = base.need(text, "num_hidden_layers") - len(shape.layers)
    heads = base.need(text, "num_attention_heads")
    kind = base.SoftmaxLayers(
        layers=layers,
        heads=base.need(text, "num_key_value_heads") or heads,
        width=text.get("head_dim") or base.need(text, "hidden_size") // heads,
    )
    return (kind,) if layers else ()


def taps(config: base.Config) -> int:
    return base.text_config(config).get("linear_conv_kernel_dim", 4)


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    changed = {**base.text_config(config), "linear_key_head_dim": width}
    if value_width:
        changed["linear_value_head_dim"] = value_width
    return {**config, "text_config": changed} if "text_config" in config else changed


def module(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def options(name: str) -> dict[str, Any]:
    """Of an Architecture: what follows from the name of transformers' module."""

    def stand_ins() -> list[base.StandIn]:
        """transformers' own functions in PyTorch, around which it may have put fla's kernels."""
        place = importlib.import_module(module(name))
        return [
            (module(name), function, inspect.unwrap(getattr(place, function)))
            for function in (*RULES, *CONVOLUTIONS)
        ]

    return {
        "call": base.Call(module(name), RULES, by_position=("q", "k", "v"), repeated=True),
        "shape": shape,
        "resized": resized,
        "softmax": softmax,
        "taps": taps,
        "stand_ins": stand_ins,
        "options": OPTIONS,
        "library": "transformers",
        "beyond": ("mtp.",),
        "mixer": "model.layers.{layer}.linear_attn.",
        "eps_key": "rms_norm_eps",
        "layer_output": lambda hidden: hidden,
    }


def _behind(parts: int) -> Callable[[base.MixerShape, base.Channels], np.ndarray]:
    """By head, behind so many parts of the size that the queries of all heads have."""

    def layout(shape: base.MixerShape, channels: base.Channels) -> np.ndarray:
        return base.by_head(shape, channels) + parts * shape.heads * shape.width

    return layout


def queries_keys_values(name: str, role: base.Role) -> tuple[ChannelTensor, ...]:
    """Of a tensor with the queries of all heads, then the keys of all, then the values."""
    return (
        ChannelTensor(name, role),
        ChannelTensor(name, role, layout=_behind(1)),
        ChannelTensor(name, role, "value", layout=_behind(2)),
    )


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of a layer's experts in one tensor: files may have them apart."""
    import torch

    result: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            layer, expert, matrix = match.groups()
            experts.setdefault(layer, {}).setdefault(matrix, {})[int(expert)] = tensor
        else:
            result[name] = tensor
    for layer, matrices in experts.items():
        numbers = [set(matrices.get(matrix, {})) for matrix in ("gate", "up", "down")]
        if not numbers[0] == numbers[1] == numbers[2]:
            continue  # what is missing is said by whoever needs it
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(matrices.get(matrix, {}).items())])
            for matrix in ("gate", "up", "down")
        )
        result[f"{layer}.gate_up_proj"] = torch.cat([gate, up], 1)
        result[f"{layer}.down_proj"] = down
    return result
