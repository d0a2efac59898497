"""A model run layer by layer: its parameters need not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from statecut.models.checkpoint import (
    Checkpoint,
    check_parameters,
    in_memory,
    tied_weights,
    unfilled,
)
from statecut.models.loaded import Loaded


@contextmanager
def _skipped(layers: Iterable[nn.Module], output: Callable[[Tensor], Any]) -> Iterator[None]:
    """While open, these layers do not run. They stay in their places: a model may ask a layer what
    mask it needs."""

    def forward(hidden: Tensor, *_: Any, **__: Any) -> Any:
        return output(hidden)

    layers = list(layers)
    for layer in layers:
        vars(layer)["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


class LayerwiseModel:
    """A model of which one layer is in memory, and the hidden states of a text before that layer;
    of a model that is in memory all layers are.

    The model's own forward pass calls the layer, with all others skipped, so that it gets the mask
    and the rotary tables that it always gets; and what is before and behind the layers is computed
    as the model does, multipliers included.
    """

    def __init__(
        self,
        source: Checkpoint | Loaded,
        batches: Sequence[Tensor],
        device: str,
        dtype: torch.dtype | None,  # the one that its config names; a model in memory has its own
    ):
        self.source, self.device = source, device
        self.prefix, _ = source.architecture.mixer.split("{layer}.")
        if isinstance(source, Loaded):
            self.model = source.model
        else:
            check_parameters(source)  # all of them, before the first layer is run
            self.model = unfilled(source, device)
        self.dtype = dtype or self.model.config.dtype
        self.decoder = self.model.eval().get_decoder()
        self.layers = list(self.decoder.layers)
        elsewhere = (self.prefix, "lm_head.", *source.architecture.passthrough)
        self._fill(self.model, "", lambda name: not name.startswith(elsewhere))
        self.states = [self._embedded(ids.to(device)) for ids in batches]
        self._empty(self.model.get_input_embeddings())
        self.next: list[Tensor] = list(self.states)

    def _empty(self, module: nn.Module) -> None:
        if isinstance(self.source, Checkpoint):
            module.to("meta")

    def _fill(self, module: nn.Module, prefix: str, has: Callable[[str], bool]) -> None:
        """Read the tensors of a module, those whose names it has, into it."""
        if isinstance(self.source, Loaded):
            return
        files = [file for name, file in self.source.stored.items() if has(name)]
        tensors = in_memory(self.source.tensors(files), self.source.architecture)
        placed = {
            name.removeprefix(prefix): tensor.to(
                self.device, self.dtype if tensor.is_floating_point() else None
            )
            for name, tensor in tensors.items()
        }
        module.load_state_dict(placed, strict=False, assign=True)

    @contextmanager
    def filled(self, index: int) -> Iterator[Any]:
        """While open, this layer is in memory and `run` runs it."""
        layer, at = self.layers[index], f"{self.prefix}{index}."
        self._fill(layer, at, lambda name: name.startswith(at))
        others = [other for other in self.layers if other is not layer]
        try:
            with _skipped(others, self.source.architecture.layer_output):
                yield layer
        finally:
            self._empty(layer)

    def run(self, index: int, batch: int) -> None:
        """One batch through a filled layer, to the states before the next."""

        states = self.states[batch]

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return states, *args[1:]  # the model may have multiplied what it was given

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.next[batch] = output[0] if isinstance(output, tuple) else output

        layer = self.layers[index]
        hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(keep)]
        try:
            self.decoder(inputs_embeds=states, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def _embedded(self, ids: Tensor) -> Tensor:
        """What enters the first layer."""
        entering: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            entering.append(args[0])

        hook = self.layers[0].register_forward_pre_hook(keep)
        try:
            with _skipped(self.layers, self.source.architecture.layer_output):
                self.decoder(input_ids=ids, use_cache=False)
        finally:
            hook.remove()
        return entering[0]

    def fill_head(self) -> None:
        """Before the first `logits`."""
        if isinstance(self.source, Checkpoint):
            head = "lm_head.weight"
            original = tied_weights(self.model).get(head, head)
            self._fill(self.model, "", lambda name: name == original)
            self.model.tie_weights()

    def logits(self, states: Tensor) -> Tensor:
        """(B, T, vocabulary), of states behind the last layer."""
        output = self.source.architecture.layer_output
        with _skipped(self.layers, lambda _: output(states)):
            return self.model(inputs_embeds=states, use_cache=False).logits

    def run_all(self, index: int) -> None:
        for batch in range(len(self.states)):
            self.run(index, batch)

    def step(self) -> None:
        """The states behind the layer are those before the next."""
        self.states = list(self.next)
