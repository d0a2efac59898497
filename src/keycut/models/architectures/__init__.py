"""The architectures that Keycut knows, one file each: an adapter says all that differs.

Where its key channels are, how a config looks with fewer, where its rule is captured, which
projection follows it, what recovery trains, what stands in on a CPU, what preflight and benchmarks
build, and its section of the configuration. Everything else asks the adapter.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from keycut.errors import InputError, nearest
from keycut.models.architectures.base import Architecture, Config, DeltaRule

_names = [file.name for file in iter_modules(__path__) if file.name != "base"]
_adapters = [import_module(f"{__name__}.{name}") for name in _names]
ARCHITECTURES: dict[str, Architecture] = {
    adapter.ARCHITECTURE.model_type: adapter.ARCHITECTURE for adapter in _adapters
}
RULES: dict[str, DeltaRule] = {kind.rule.name: kind.rule for kind in ARCHITECTURES.values()}
SECTIONS = tuple(adapter.SECTION for adapter in _adapters if hasattr(adapter, "SECTION"))
"""Of the configuration. `keycut prune` needs none."""


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
