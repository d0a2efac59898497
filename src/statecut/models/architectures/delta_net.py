"""DeltaNet, as in flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statecut.models.architectures import base

CALL = base.Call("fla.layers.delta_net", ("chunk_delta_rule", "fused_recurrent_delta_rule"))


def shape(config: base.Config) -> base.MixerShape:
    hidden, heads = base.need(config, "hidden_size"), base.need(config, "num_heads")

    def width(key: str) -> int:
        share = config.get(key, 1.0)
        what = f"hidden_size {hidden} x {key} {share} / num_heads {heads}"
        return base.whole(hidden * share / heads, what)

    layers = base.mixer_layers(config)
    return base.MixerShape(layers, heads, width("expand_k"), heads, width("expand_v"))


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    # fla takes int(hidden_size * expand_k) up to 0.5, and rounds since.
    heads, hidden = config["num_heads"], config["hidden_size"]
    config = {**config, "expand_k": base.factor(heads * width, hidden)}
    return config | ({"expand_v": base.factor(heads * value_width, hidden)} if value_width else {})


def cpu_fallbacks() -> dict[str, Callable[..., Any]]:
    from statecut.models import plain_kernels

    return dict.fromkeys(CALL.functions, plain_kernels.delta_rule)


def _layer(*, width: int, head_v_dim: int, num_v_heads: int = 0, **sizes: Any) -> Any:
    from fla import layers

    return layers.DeltaNet(**resized(sizes, width, head_v_dim), layer_idx=0)


def mixer_parameters(config: base.Config, shape: base.MixerShape, filters: int = 0) -> int:
    hidden, keys = config["hidden_size"], shape.heads * shape.width
    values = shape.heads * shape.value_width
    taps = config["conv_size"] * (filters or 2 * keys + values)
    return 2 * hidden * (keys + values) + taps + hidden * shape.heads + shape.value_width


SECTION = base.Section(
    "DeltaNet",
    architecture="delta_net",
    model_type="delta_net",
    about="DeltaNet, as in flash-linear-attention: head widths follow from hidden_size.",
    sizes=(
        base.Size("expand_k", float, "keys of all heads, as a multiple of hidden_size", 1.0),
        base.Size("expand_v", float, "values of all heads, as a multiple of hidden_size", 1.0),
    ),
    mixer_parameters=mixer_parameters,
)
ARCHITECTURE = base.Architecture(
    "delta_net",
    rule=base.DeltaRule("delta_net", "chunk_delta_rule", _layer, heads=16, value_width=128),
    call=CALL,
    shape=shape,
    resized=resized,
    cpu_fallbacks=cpu_fallbacks,
    float32=False,
    unused=("D",),
)
