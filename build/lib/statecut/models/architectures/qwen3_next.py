"""Qwen3-Next, as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statecut.models.architectures import base, gated_deltanet
from statecut.models.architectures import linear_attention as hybrid

if TYPE_CHECKING:
    import numpy as np


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


Q = _part("key", lambda width, values: 0)
K = _part("key", lambda width, values: width)
V = _part("value", lambda width, values: 2 * width)
Z = _part("value", lambda width, values: 2 * width + values)
FILTERS = hybrid.queries_keys_values("conv1d.weight", "filter")

ARCHITECTURE = base.Architecture(
    "qwen3_next",
    rule=gated_deltanet.ARCHITECTURE.rule,
    **hybrid.options("qwen3_next"),
    joined=hybrid.stack_experts,
    q_proj=Q,
    k_proj=K,
    filters=FILTERS[:2],
    v_proj=V,
    value_tensors=(Z, FILTERS[2]),
    o_proj="out_proj.weight",
    norm_eps="norm.variance_epsilon",
    projections=("in_proj_qkvz",),
    convolutions=("conv1d",),
)
