"""What enters the mixers of a model, and the delta rules in them, during a forward pass."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from keycut.models.architectures import architecture
from keycut.models.architectures.base import Architecture, KeyShape


def mixers(model: Any) -> tuple[Architecture, KeyShape, list[Any]]:
    """The adapter of a model, the shape of its mixers, and the modules of `shape.layers`."""
    config = model.config.to_dict()
    kind = architecture(config)
    shape = kind.shape(config)
    places = (kind.mixer.format(layer=layer).rstrip(".") for layer in shape.layers)
    return kind, shape, [model.get_submodule(place) for place in places]


@contextmanager
def watched(
    model: Any,
    *,
    rule: Callable[[int, dict[str, Any]], None],
    inputs: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """While open, `inputs` is shown what enters each mixer (B, T, hidden), and `rule` the
    arguments of its delta rule by name. Both get the mixer's place in `shape.layers` first.

    A forward hook on the convolutions would not do: Gated DeltaNet joins the three of them into
    one call. So the names that the layers call are wrapped; a hook tells which layer calls.
    """
    kind, shape, modules = mixers(model)
    call, copies = kind.call, shape.value_heads // shape.heads
    current = [-1]

    def entered(place: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current[0] = place
            if inputs is not None:
                inputs(place, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return hook

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def shown(*args: Any, **given: Any) -> Any:
            arguments = {**dict(zip(call.by_position, args, strict=False)), **given}
            if call.repeated:
                arguments |= {side: arguments[side][:, :, ::copies] for side in "qk"}
            rule(current[0], arguments)
            return original(*args, **given)

        return shown

    hooks = [
        mixer.register_forward_pre_hook(entered(place), with_kwargs=True)
        for place, mixer in enumerate(modules)
    ]
    module = importlib.import_module(call.module)
    originals = {name: getattr(module, name) for name in call.functions}
    try:
        for name, original in originals.items():
            setattr(module, name, wrapped(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
        for hook in hooks:
            hook.remove()
