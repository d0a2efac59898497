"""Qwen3-Next, as in transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keycut.models.architectures import base, gated_deltanet
from keycut.models.architectures import linear_attention as hybrid

if TYPE_CHECKING:
    import numpy as np


def _block_of_head(side: int) -> Callable[[base.MixerShape], np.ndarray]:
    """For each key head: its query, its key, and the values and gates of its value heads."""

    def layout(shape: base.MixerShape) -> np.ndarray:
        import numpy as np

        block = 2 * shape.width + 2 * hybrid.values(shape) // shape.heads
        starts = np.arange(shape.heads) * block + side * shape.width
        return starts[:, None] + np.arange(shape.width)

    return layout


Q, K = (
    base.ChannelTensor(
        "in_proj_qkvz.weight",
        "projection",
        layout=_block_of_head(side),
        others=lambda shape: 2 * hybrid.values(shape),
    )
    for side in (0, 1)
)

ARCHITECTURE = base.Architecture(
    "qwen3_next",
    rule=gated_deltanet.ARCHITECTURE.rule,
    **hybrid.options("qwen3_next"),
    joined=hybrid.stack_experts,
    q_proj=Q,
    k_proj=K,
    filters=hybrid.queries_keys_values("conv1d.weight", "filter"),
    o_proj="out_proj.weight",
    norm_eps="norm.variance_epsilon",
    projections=("in_proj_qkvz",),
    convolutions=("conv1d",),
)
