"""Gated DeltaNet, as in flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statecut.errors import InputError
from statecut.models.architectures import base

CALL = base.Call(
    "fla.layers.gated_deltanet",
    ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    options={"state_v_first": True},
)


def shape(config: base.Config, expand_v: float = 2.0) -> base.MixerShape:
    heads, width = base.need(config, "num_heads"), base.need(config, "head_dim")
    value_heads, expand_v = config.get("num_v_heads") or heads, config.get("expand_v", expand_v)
    if value_heads % heads:
        raise InputError(f"num_v_heads {value_heads} must be a multiple of num_heads {heads}")
    value_width = base.whole(width * expand_v, f"head_dim {width} x expand_v {expand_v}")
    return base.MixerShape(base.mixer_layers(config), heads, width, value_heads, value_width)


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    # fla takes int(head_dim * expand_v).
    expand_v = base.factor(value_width or shape(config).value_width, width)
    return {**config, "head_dim": width, "expand_v": expand_v}


def cpu_fallbacks() -> dict[str, Callable[..., Any]]:
    from statecut.models import plain_kernels

    rules = dict.fromkeys(CALL.functions, plain_kernels.delta_rule)
    return {**rules, "causal_conv1d": plain_kernels.causal_conv1d}


def _layer(*, width: int, head_v_dim: int, **sizes: Any) -> Any:
    from fla import layers

    expand_v = base.factor(head_v_dim, width)
    return layers.GatedDeltaNet(**sizes, head_dim=width, expand_v=expand_v, layer_idx=0)


def mixer_parameters(config: base.Config, shape: base.MixerShape) -> int:
    hidden, keys = config["hidden_size"], shape.heads * shape.width
    values = shape.value_heads * shape.value_width
    projections = 2 * hidden * (keys + values) + (hidden * values if config["use_gate"] else 0)
    # a and beta from the input; A_log and dt_bias of their own.
    decay = (2 * hidden + 2) * shape.value_heads
    return projections + config["conv_size"] * (2 * keys + values) + decay + shape.value_width


VALUE_HEADS = "heads of values, a multiple of num_heads; as many if absent"
HEAD_SIZES = (
    base.Size("head_dim", int, "width of a head's keys and queries"),
    base.Size("expand_v", float, "width of a head's values, as a multiple of that"),
    base.Size("num_v_heads", int, VALUE_HEADS, None),
)
SECTION = base.Section(
    "GatedDeltaNet",
    architecture="gated_deltanet",
    model_type="gated_deltanet",
    about="Gated DeltaNet, as in flash-linear-attention: head widths are free.",
    sizes=(*HEAD_SIZES, base.Size("use_gate", bool, "whether the output is gated", True)),
    mixer_parameters=mixer_parameters,
)
RULE = base.DeltaRule("gated_deltanet", "chunk_gated_delta_rule", _layer, heads=4, value_width=256,
                      gated=True, grouped=True)  # fmt: skip
ARCHITECTURE = base.Architecture(
    "gated_deltanet",
    rule=RULE,
    call=CALL,
    shape=shape,
    resized=resized,
    cpu_fallbacks=cpu_fallbacks,
    unused=("D",),
)
