"""DeltaNet whose channels share convolution filters (`statecut.models.shared_conv`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Literal

from statecut.models.architectures import base, delta_net


def _mixer_parameters(config: base.Config, shape: base.MixerShape) -> int:
    filters = 3 * (shape.heads if config["conv_sharing"] == "head" else 1)
    return delta_net.mixer_parameters(config, shape, filters)


SHARING = "one filter per head, or one for all heads and channels"
SECTION = replace(
    delta_net.SECTION,
    name="SharedDeltaNet",
    architecture="delta_net_shared",
    model_type="delta_net_shared_conv",
    about="DeltaNet whose channels share convolution filters, in q, k and v each.",
    sizes=(
        *delta_net.SECTION.sizes,
        base.Size("conv_sharing", Literal["head", "all"], SHARING),
    ),
    mixer_parameters=_mixer_parameters,
)
ARCHITECTURE = replace(
    delta_net.ARCHITECTURE,
    model_type="delta_net_shared_conv",
    # A filter of a whole head, or of all of them, has no channels of its own.
    filters=(),
    value_tensors=delta_net.ARCHITECTURE.value_tensors[2:],
    options=("use_gate", "conv_sharing"),
    register=partial(import_module, "statecut.models.shared_conv"),
    library="statecut.models.shared_conv",
)
