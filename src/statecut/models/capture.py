"""What enters the mixers of a model, and the delta rules in them, during a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from statecut.models.architectures import architecture
from statecut.models.architectures.base import Architecture
from statecut.models.fixes import replace_functions
from statecut.models.shapes import MixerShape


def mixers(model: Any) -> tuple[Architecture, MixerShape, list[Any]]:
    """The adapter of a model, the shape of its mixers, and the modules of `shape.layers`."""
    config = model.config.to_dict()
    adapter = architecture(config)
    shape = adapter.shape(config)
    names = (adapter.mixer.format(layer=layer).rstrip(".") for layer in shape.layers)
    return adapter, shape, [model.get_submodule(name) for name in names]


@contextmanager
def capture_rule_inputs(
    model: Any,
    on_rule: Callable[[int, dict[str, Any]], None],
    on_mixer: Callable[[int, Tensor], None] | None = None,
    on_gradient: Callable[[int, str, Tensor, Tensor], None] | None = None,
    on_output: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """While open, `on_rule` is called with the arguments of each delta rule by name, `on_mixer`
    with what enters its mixer, (B, T, hidden), and `on_output` with what enters the projection
    behind it, (B, T, value heads, d_v). `on_gradient` is called in the backward pass, with "q" or
    "k", what the rule received of it (B, T, heads, d_k), and its gradient; where there is an
    `on_output`, with "v" and what that got, too. All get the mixer's place in `shape.layers` first.

    A forward hook on the convolutions would not do: Gated DeltaNet joins the three of them into
    one call. So the names that the layers call are wrapped; a hook tells which layer calls.
    Before 5.23 transformers' layers repeat q and k for each value head; here each comes once.
    """
    adapter, shape, modules = mixers(model)
    call = adapter.call
    current = -1

    def enter(index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal current
        current = index
        if on_mixer is not None:
            on_mixer(index, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def hook_gradient(index: int, side: str, x: Tensor) -> None:
        if on_gradient is None or not x.requires_grad:  # the caller learns of missing gradients
            return
        repeats = 1 if side == "v" else x.shape[2] // shape.heads
        # Detached: a hook that holds its own tensor would never be freed.
        seen = partial(on_gradient, index, side, x.detach()[:, :, ::repeats])
        x.register_hook(lambda gradient: seen(gradient.unflatten(2, (-1, repeats)).sum(3)))

    def rule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(call.by_position, args, strict=False)), **kwargs}
        for side in "qk":
            x = arguments[side]
            hook_gradient(current, side, x)
            arguments[side] = x[:, :, :: x.shape[2] // shape.heads]
        on_rule(current, arguments)
        return original(*args, **kwargs)

    def leave(index: int, module: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
        assert on_output is not None
        by_head = args[0].unflatten(-1, (shape.value_heads, shape.value_width))
        on_output(index, by_head)
        hook_gradient(index, "v", by_head)
        return (by_head.flatten(-2),)  # through which gradients come

    hooks = []
    for index, mixer in enumerate(modules):
        hooks.append(mixer.register_forward_pre_hook(partial(enter, index), with_kwargs=True))
        if on_output is not None:
            o_proj = mixer.get_submodule(adapter.o_proj.removesuffix(".weight"))
            hooks.append(o_proj.register_forward_pre_hook(partial(leave, index)))
    module = import_module(call.module)
    originals = replace_functions(
        {(call.module, name): partial(rule, getattr(module, name)) for name in call.functions}
    )
    try:
        yield
    finally:
        replace_functions(originals)
        for hook in hooks:
            hook.remove()
