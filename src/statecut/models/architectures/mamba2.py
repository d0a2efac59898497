"""Hybrids of Mamba2 and softmax attention, as in transformers.

A head of Mamba2 is a linear attention: B, C and x are its keys, queries and values, and groups of
heads share B and C. These have no L2 norm, and no d_k^-1/2 scales the output.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from statecut.errors import InputError
from statecut.models.architectures import base
from statecut.models.architectures import linear_attention as hybrid
from statecut.models.architectures.base import ChannelTensor

if TYPE_CHECKING:
    import numpy as np

FUNCTIONS = ("causal_conv1d_fn", "causal_conv1d_update", "mamba2_chunk_scan",
             "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined")  # fmt: skip
MODULE = "transformers.models.nemotron_h.modeling_nemotron_h"
LETTERS = {"M": "mamba", "*": "attention"}  # of the pattern in nemotron_h's older configs
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


def _part(
    name: str, role: base.Role, channels: base.Channels | None, values: int, keys: int
) -> ChannelTensor:
    """By head, behind so many parts of the size of all values, and of all keys."""

    def layout(shape: base.MixerShape, channels: base.Channels | None) -> np.ndarray:
        before = values * shape.value_heads * shape.value_width + keys * shape.heads * shape.width
        return base.by_head(shape, channels) + before

    return ChannelTensor(name, role, channels, layout=layout)


def _projection(name: str, role: base.Role) -> tuple[ChannelTensor, ...]:
    """C, B and x of a tensor with the gate, x, B, C, and a time step for each head; then these."""
    return (
        _part(name, role, "key", 2, 1),
        _part(name, role, "key", 2, 0),
        _part(name, role, "value", 1, 0),
        _part(name, role, "value", 0, 0),
        _part(name, role, None, 2, 2),
    )


def _filters(name: str, role: base.Role) -> tuple[ChannelTensor, ...]:
    """C, B and x of a tensor with x, B, C."""
    return (
        _part(name, role, "key", 1, 1),
        _part(name, role, "key", 1, 0),
        _part(name, role, "value", 0, 0),
    )


def _layers(config: base.Config, kind: str) -> tuple[int, ...]:
    """Of nemotron_h, whose MLPs and experts are layers of their own."""
    kinds = config.get("layers_block_type")
    if kinds is None:
        kinds = [LETTERS.get(letter) for letter in config.get("hybrid_override_pattern", "")]
    return tuple(layer for layer, found in enumerate(kinds) if KINDS.get(found, found) == kind)


def _nemotron_shape(config: base.Config) -> base.MixerShape:
    heads, value_heads, width, value_width = (
        base.need(config, key)
        for key in ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim")
    )
    if value_heads % heads:
        raise InputError(f"mamba_num_heads {value_heads} must be a multiple of n_groups {heads}")
    layers = _layers(config, "mamba")
    if not layers:
        raise InputError("layers_block_type must have at least one 'linear_attention'")
    return base.MixerShape(layers, heads, width, value_heads, value_width)


def _nemotron_resized(
    config: base.Config, width: int, value_width: int | None = None
) -> base.Config:
    values = {"mamba_head_dim": value_width} if value_width else {}
    return {**config, "ssm_state_size": width, **values}


def _nemotron_softmax(
    config: base.Config, shape: base.MixerShape
) -> tuple[base.SoftmaxLayers, ...]:
    layers = len(_layers(config, "attention"))
    kind = base.SoftmaxLayers(
        layers, base.need(config, "num_key_value_heads"), config.get("head_dim", 128)
    )
    return (kind,) if layers else ()


C, B, X, *OTHERS = _projection("in_proj.weight", "projection")
TENSORS = (
    *_projection("in_proj.bias", "bias"),
    *_filters("conv1d.weight", "filter"),
    *_filters("conv1d.bias", "bias"),
)
NEMOTRON_H = base.Architecture(
    "nemotron_h",
    rule=None,
    call=base.Call(
        MODULE, ("mamba2_chunk_scan",), by_position=("v", "dt", "A", "k", "q"), scaled=False
    ),
    shape=_nemotron_shape,
    resized=_nemotron_resized,
    cpu_fallbacks=partial(hybrid.in_pytorch, MODULE, FUNCTIONS),
    softmax=_nemotron_softmax,
    taps=lambda config: config.get("conv_kernel", 4),
    options=(),
    library="transformers",
    text_model="backbone.",
    passthrough=("mtp.",),
    joined=hybrid.stack_experts,
    mixer="model.layers.{layer}.mixer.",
    q_proj=C,
    k_proj=B,
    filters=tuple(tensor for tensor in TENSORS if tensor.channels == "key"),
    v_proj=X,
    value_tensors=(*OTHERS, *(tensor for tensor in TENSORS if tensor.channels != "key")),
    o_proj="out_proj.weight",
    layer_output=lambda hidden: hidden,
    norm_eps="norm.variance_epsilon",
    eps_key="layer_norm_epsilon",
    default_eps=1e-5,
    own_norms=True,
    projections=("in_proj",),
    convolutions=("conv1d",),
)
