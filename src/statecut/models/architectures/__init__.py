"""The architectures that Statecut knows: each `Architecture` in a file here is one of them
(docs/reference/architectures.md)."""

from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules

from statecut.errors import InputError, nearest
from statecut.models.architectures.base import Architecture, Config, DeltaRule, Section, text_config

_modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
_values = [value for module in _modules for value in vars(module).values()]
ARCHITECTURES = {kind.model_type: kind for kind in _values if isinstance(kind, Architecture)}
SECTIONS = {section.architecture: section for section in _values if isinstance(section, Section)}
"""By what the configuration of a run calls them. `statecut prune` needs none."""
MODULES = {m.SECTION.architecture: m.__name__ for m in _modules if hasattr(m, "SECTION")}
RULES: dict[str, DeltaRule] = {
    kind.rule.name: kind.rule for kind in ARCHITECTURES.values() if kind.rule
}

_BOUND = "the width of its keys is bound to that of its residual stream or its heads"
_MULTIPLIED = (
    "what its Mamba2 layers add to the residual stream is multiplied by a number of its config, "
    "which refit and recovery do not know; of Mamba2 hybrids Statecut cuts nemotron_h"
)
REFUSED = {
    "rwkv7": _BOUND,
    "minimax": _BOUND,
    "granitemoehybrid": _MULTIPLIED,
    "falcon_h1": _MULTIPLIED,
}
QUANTISED = ("quantization_config", "compression_config", "quantization")  # keys of a config


def register() -> None:
    """AutoModel knows all that can be made here, once fla is imported."""
    for kind in ARCHITECTURES.values():
        if not kind.missing():
            kind.register()


def architecture(config: Config) -> Architecture:
    model_type = config.get("model_type")
    if model_type in REFUSED:
        raise InputError(f"model_type {model_type!r} cannot be pruned: {REFUSED[model_type]}")
    if model_type not in ARCHITECTURES:
        hint = nearest(str(model_type), ARCHITECTURES)
        raise InputError(f"model_type {model_type!r} is none that Statecut knows{hint}")
    kind = ARCHITECTURES[model_type]
    for part in (config, text_config(config)):
        for key in QUANTISED:
            if part.get(key) and not _spares(part[key], kind):
                method = part[key].get("quant_method") or part[key].get("format") or "quantised"
                raise InputError(
                    f"config.json: {key} ({method}): quantised weights cannot be sliced, their "
                    "scales belong to blocks of channels; prune the model in 16 or 32 bits and "
                    "quantise the result"
                )
    return kind


def _spares(quantisation: Config, kind: Architecture) -> bool:
    """Whether the layers with a delta rule are left out of it."""
    patterns = [str(name) for name in quantisation.get("ignore") or ()]
    mixer = kind.text_model + kind.name(0, kind.q_proj).removeprefix("model.")
    return any(re.match(p.removeprefix("re:"), mixer) for p in patterns if p.startswith("re:"))
