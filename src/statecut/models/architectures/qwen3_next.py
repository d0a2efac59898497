"""Qwen3-Next, as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statecut.models.architectures import base, gated_deltanet
from statecut.models.architectures import linear_attention as hybrid

if TYPE_CHECKING:
    import numpy as np

ROPE = ("rope_theta", "partial_rotary_factor")


def _part(channels: base.Channels, start: Callable[[int, int], int]) -> base.ChannelTensor:
    """Of the blocks of key heads: its query, its key, the values and the gates of its value heads.
    `start` says from d_k and the number of its values where in a block the part begins."""

    def layout(shape: base.MixerShape, channels: base.Channels) -> np.ndarray:
        import numpy as np

        values = shape.value_heads // shape.heads * shape.value_width
        blocks = np.arange(shape.heads) * 2 * (shape.width + values)
        length = shape.width if channels == "key" else values
        return blocks[:, None] + start(shape.width, values) + np.arange(length)

    return base.ChannelTensor("in_proj_qkvz.weight", "projection", channels, layout=layout)


def _resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    """With what mlx-lm reads at the top, as hub models have it; transformers 5 does not save it."""
    rope = {k: v for k, v in (config.get("rope_parameters") or {}).items() if k in ROPE}
    return {**rope, **hybrid.resized(config, width, value_width)}


ARCHITECTURE = base.Architecture(
    "qwen3_next",
    rule=gated_deltanet.RULE,
    **hybrid.options("qwen3_next") | {"resized": _resized},
    joined=hybrid.stack_experts,
    q_proj=_part("key", lambda width, values: 0),
    k_proj=_part("key", lambda width, values: width),
    filters=hybrid.JOINT[:2],
    v_proj=_part("value", lambda width, values: 2 * width),
    value_tensors=(_part("value", lambda width, values: 2 * width + values), hybrid.JOINT[2]),
    o_proj="out_proj.weight",
    norm_eps="norm.variance_epsilon",
    projections=("in_proj_qkvz",),
    convolutions=("conv1d",),
)
