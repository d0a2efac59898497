"""The architectures that Keycut knows, one file each: an adapter says all that differs.

Where its key channels are, how a config looks with fewer, where its rule is captured, which
projection follows it, what recovery trains, what stands in on a CPU, what preflight and benchmarks
build, and its section of the configuration. Everything else asks the adapter.
"""

from __future__ import annotations

from keycut.errors import InputError, nearest
from keycut.models.architectures.base import Architecture, Config, DeltaRule
from keycut.models.architectures.delta_net import DELTA_NET, DeltaNet
from keycut.models.architectures.delta_net_shared_conv import DELTA_NET_SHARED_CONV, SharedDeltaNet
from keycut.models.architectures.gated_deltanet import GATED_DELTANET, GatedDeltaNet

ARCHITECTURES = {
    kind.model_type: kind for kind in (DELTA_NET, DELTA_NET_SHARED_CONV, GATED_DELTANET)
}
RULES: dict[str, DeltaRule] = {kind.rule.name: kind.rule for kind in ARCHITECTURES.values()}
# Of the configuration. No part of the adapters: a new key is no change of code that computes.
SECTIONS = (DeltaNet, SharedDeltaNet, GatedDeltaNet)


def register() -> None:
    """AutoModel knows all of them, once fla is imported."""
    for kind in ARCHITECTURES.values():
        kind.register()


def architecture(config: Config) -> Architecture:
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        hint = nearest(str(model_type), ARCHITECTURES)
        raise InputError(f"model_type {model_type!r} is none that Keycut knows{hint}")
    return ARCHITECTURES[model_type]
