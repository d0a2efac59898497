"""A model run layer by layer: its parameters need not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from statecut.models.checkpoint import Checkpoint, check_parameters, in_memory, unfilled
from statecut.models.loaded import Loaded


class _Given(nn.Module):
    """In the place of a module that is not to run."""

    def __init__(self, output: Callable[[], Any]):
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output()


class LayerwiseModel:
    """A model of which one layer is in memory, and the hidden states of a text before that layer;
    of a model that is in memory all layers are.

    The model's own forward pass calls the layer, with all others skipped, so that it gets the mask,
    the rotary tables and the token ids that it always gets.
    """

    def __init__(
        self,
        source: Checkpoint | Loaded,
        batches: Sequence[Tensor],
        device: str,
        dtype: torch.dtype | None,  # the one that its config names; a model in memory has its own
    ):
        self.source, self.device, self.batches = source, device, batches
        self.prefix = source.architecture.prefix
        if isinstance(source, Loaded):
            self.model = source.model
        else:
            check_parameters(source)  # all of them, before the first layer is run
            self.model = unfilled(source, device)
        self.dtype = dtype or self.model.config.dtype
        self.decoder = self.model.get_decoder()
        self.layers = list(self.decoder.layers)
        elsewhere = (self.prefix, "lm_head.", *source.architecture.passthrough)
        self._fill(self.model, "", lambda name: not name.startswith(elsewhere))
        embeddings = self.model.get_input_embeddings()
        self.states = [embeddings(ids.to(device)) for ids in batches]
        self._empty(embeddings)
        self.next: list[Tensor] = list(self.states)
        self.current: Tensor  # the states of the batch that runs

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
        decoder, output = self.decoder, self.source.architecture.layer_output
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        embeddings = decoder.get_input_embeddings()
        # Layers that are skipped ignore the embeddings, so of several streams any has their shape.
        width = embeddings.embedding_dim
        decoder.set_input_embeddings(_Given(lambda: self.current.flatten(2)[..., :width]))
        # The others stay in their places: a model may ask a layer which mask it needs.
        for number, other in enumerate(self.layers):
            if number < index:
                vars(other)["forward"] = lambda *_, **__: output(self.current)
            elif number > index:
                vars(other)["forward"] = lambda hidden, *_, **__: output(hidden)
        try:
            yield layer
        finally:
            for other in self.layers:
                vars(other).pop("forward", None)
            for module in training:
                module.training = True
            decoder.set_input_embeddings(embeddings)
            self._empty(layer)

    def run(self, index: int, batch: int) -> Tensor:
        """One batch through a filled layer, to the states before the next. Returns what the decoder
        makes of them: of those behind the last layer, what enters the head."""

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.next[batch] = output[0] if isinstance(output, tuple) else output

        hook = self.layers[index].register_forward_hook(keep)
        self.current = self.states[batch]
        try:
            ids = self.batches[batch].to(self.device)
            return self.decoder(ids, use_cache=False).last_hidden_state
        finally:
            hook.remove()

    def run_all(self, index: int) -> None:
        for batch in range(len(self.states)):
            self.run(index, batch)

    def step(self) -> None:
        """The states behind the layer are those before the next."""
        self.states = list(self.next)
