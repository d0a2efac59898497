"""What enters the mixers of a model, and the delta rules in them, during a forward pass."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from keycut.models.architectures import KeyShape, architecture

# Where fla's layers look up their delta rules.
DELTA_RULES = {
    "fla.layers.delta_net": ("chunk_delta_rule", "fused_recurrent_delta_rule"),
    "fla.layers.gated_deltanet": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
}


def mixers(model: Any) -> tuple[KeyShape, list[Any]]:
    """The shape of a model's mixers, and the modules of its layers `shape.layers`."""
    config = model.config.to_dict()
    kind = architecture(config)
    shape = kind.shape(config)
    places = (kind.mixer.format(layer=layer).rstrip(".") for layer in shape.layers)
    return shape, [model.get_submodule(place) for place in places]


@contextmanager
def watched(
    mixers: list[Any],
    *,
    rule: Callable[[int, dict[str, Any]], None],
    inputs: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """While open, `inputs` is shown what enters each mixer (B, T, hidden), and `rule` the
    arguments of its delta rule by name. Both get the mixer's place in the list first.

    A forward hook on the convolutions would not do: Gated DeltaNet joins the three of them into
    one call. So the names that the layers call are wrapped; a hook tells which layer calls.
    """
    current = [-1]

    def entered(place: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current[0] = place
            if inputs is not None:
                inputs(place, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return hook

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            rule(current[0], arguments)
            return original(**arguments)

        return call

    hooks = [
        mixer.register_forward_pre_hook(entered(place), with_kwargs=True)
        for place, mixer in enumerate(mixers)
    ]
    names = [
        (importlib.import_module(module), name)
        for module, rules in DELTA_RULES.items()
        for name in rules
    ]
    originals = [getattr(module, name) for module, name in names]
    try:
        for (module, name), original in zip(names, originals, strict=True):
            setattr(module, name, wrapped(original))
        yield
    finally:
        for (module, name), original in zip(names, originals, strict=True):
            setattr(module, name, original)
        for hook in hooks:
            hook.remove()
