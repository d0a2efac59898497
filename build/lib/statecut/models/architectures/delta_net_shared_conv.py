"""DeltaNet whose channels share convolution filters (`statecut.models.shared_conv`)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from reproduction.config.section import WHICH
from statecut.models.architectures import base, delta_net


def _register() -> None:
    import statecut.models.shared_conv  # noqa: F401


class SharedDeltaNet(delta_net.DeltaNetBase):
    """DeltaNet whose channels share convolution filters, in q, k and v each."""

    architecture: Literal["delta_net_shared"] = WHICH
    model_type: ClassVar[str] = "delta_net_shared_conv"
    conv_sharing: Literal["head", "all"] = Field(
        description="one filter per head, or one for all heads and channels"
    )

    @property
    def parameters(self) -> int:
        return self._with_filters(3 * (self.num_heads if self.conv_sharing == "head" else 1))


SECTION = SharedDeltaNet
ARCHITECTURE = replace(
    delta_net.ARCHITECTURE,
    model_type="delta_net_shared_conv",
    # A filter of a whole head, or of all of them, has no channels of its own.
    filters=(),
    value_tensors=(base.ChannelTensor("g_proj.weight", "projection", "value"),),
    options=("use_gate", "conv_sharing"),
    register=_register,
    library="statecut.models.shared_conv",
)
