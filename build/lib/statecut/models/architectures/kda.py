"""Kimi Delta Attention, as in flash-linear-attention: each key channel has a decay of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from statecut.models.architectures import base, gated_deltanet

if TYPE_CHECKING:
    import numpy as np

CALL = base.Call("fla.layers.kda", ("chunk_kda", "fused_recurrent_kda"))


def _with_default(config: base.Config) -> base.Config:
    return {"expand_v": 1.0, **config}


def shape(config: base.Config) -> base.MixerShape:
    return gated_deltanet.shape(_with_default(config))


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    return gated_deltanet.resized(_with_default(config), width, value_width)


def stand_ins() -> list[base.StandIn]:
    from statecut.models import plain_kernels

    return [(CALL.module, name, plain_kernels.kda) for name in CALL.functions]


def _by_value_head(shape: base.MixerShape, channels: base.Channels) -> np.ndarray:
    """(copies, heads, d_k): the channels of a key head once for each of its value heads."""
    import numpy as np

    rows = np.arange(shape.value_heads * shape.width)
    return rows.reshape(shape.heads, -1, shape.width).swapaxes(0, 1)


ARCHITECTURE = replace(
    gated_deltanet.ARCHITECTURE,
    model_type="kda",
    rule=None,
    call=CALL,
    shape=shape,
    resized=resized,
    stand_ins=stand_ins,
    options=("allow_neg_eigval", "safe_gate", "lower_bound"),
    # A rotation leaves no decay to a channel; as with filters, (T∘T) W stands in for it.
    filters=(
        *gated_deltanet.ARCHITECTURE.filters,
        base.ChannelTensor("f_proj.1.weight", "filter", layout=_by_value_head),
        base.ChannelTensor("dt_bias", "filter", layout=_by_value_head),
    ),
    value_tensors=(
        *gated_deltanet.ARCHITECTURE.value_tensors[:2],
        base.ChannelTensor("g_proj.1.weight", "projection", "value"),
        base.ChannelTensor("g_proj.1.bias", "bias", "value"),
    ),
    bottlenecks=(
        ("f_proj.0.weight", "f_proj.1.weight"),
        ("g_proj.0.weight", "g_proj.1.weight"),
    ),
)
