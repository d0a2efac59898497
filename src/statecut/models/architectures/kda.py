"""Kimi Delta Attention, as in flash-linear-attention: each key channel has a decay of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from statecut.models.architectures import base, gated_deltanet
from statecut.models.architectures.gated_deltanet import ARCHITECTURE as GATED

if TYPE_CHECKING:
    import numpy as np

CALL = base.Call(
    "fla.layers.kda", ("chunk_kda", "fused_recurrent_kda"), options={"state_v_first": True}
)


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    return gated_deltanet.resized({"expand_v": 1.0, **config}, width, value_width)


def cpu_fallbacks() -> dict[str, Callable[..., Any]]:
    from statecut.models import plain_kernels

    return dict.fromkeys(CALL.functions, plain_kernels.kda)


def _layer(*, width: int, head_v_dim: int, use_gate: bool, **sizes: Any) -> Any:
    from fla import layers

    expand_v = base.factor(head_v_dim, width)
    return layers.KimiDeltaAttention(**sizes, head_dim=width, expand_v=expand_v, layer_idx=0)


def mixer_parameters(config: base.Config, shape: base.MixerShape) -> int:
    hidden, keys = config["hidden_size"], shape.heads * shape.width
    values, decays = shape.value_heads * shape.value_width, shape.value_heads * shape.width
    projections = 2 * hidden * (keys + values) + config["conv_size"] * (2 * keys + values)
    # Both gates through d_v channels; biases of both, beta and A_log, and the norm.
    gates = shape.value_width * (2 * hidden + decays + values) + decays + values
    return projections + gates + (hidden + 1) * shape.value_heads + shape.value_width


def _by_value_head(shape: base.MixerShape, channels: base.Channels) -> np.ndarray:
    """(copies, heads, d_k): the channels of a key head once for each of its value heads."""
    import numpy as np

    rows = np.arange(shape.value_heads * shape.width)
    return rows.reshape(shape.heads, -1, shape.width).swapaxes(0, 1)


RULE = base.DeltaRule("kda", "chunk_kda", _layer, heads=16, value_width=128, gated=True,
                      per_channel=True, grouped=True)  # fmt: skip
SECTION = base.Section(
    "KimiDeltaAttention",
    architecture="kda",
    model_type="kda",
    about="Kimi Delta Attention, as in flash-linear-attention: head widths are free.",
    sizes=gated_deltanet.HEAD_SIZES,
    mixer_parameters=mixer_parameters,
)
ARCHITECTURE = replace(
    GATED,
    model_type="kda",
    rule=RULE,
    call=CALL,
    shape=partial(gated_deltanet.shape, expand_v=1.0),
    resized=resized,
    cpu_fallbacks=cpu_fallbacks,
    options=("allow_neg_eigval", "safe_gate", "lower_bound"),
    # A rotation leaves no decay to a channel; as with filters, (T∘T) W takes its place.
    filters=(
        *GATED.filters,
        base.ChannelTensor("f_proj.1.weight", "filter", layout=_by_value_head),
        base.ChannelTensor("dt_bias", "filter", layout=_by_value_head),
    ),
    value_tensors=(
        *GATED.value_tensors[:2],
        base.ChannelTensor("g_proj.1.weight", "projection", "value"),
        base.ChannelTensor("g_proj.1.bias", "bias", "value"),
    ),
    bottlenecks=tuple((f"{gate}_proj.0.weight", f"{gate}_proj.1.weight") for gate in "fg"),
)
