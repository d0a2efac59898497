"""Greedy generation from the recurrent state, one token at a time.

Python takes longer to launch the kernels of a step than a GPU to run them, so there a step is
captured once as a CUDA graph and replayed for every further token, if memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

MARGIN = 64 << 20  # bytes: the allocator takes memory in pieces of 2 and 20 MiB


class GreedyGeneration:
    """Sequences that go on, greedily, from a recurrent state and a last token (batch, 1)."""

    def __init__(self, model: Any, state: Any, last: Tensor, mask: Tensor | None = None):
        """`mask` (batch, length) has zeros where the state has padding that attention could see."""
        self.model, self.state, self.last, self.mask = model, state, last, mask

    @torch.inference_mode()
    def run(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The next `tokens` tokens (batch, tokens), and the logit of each."""
        steps: list[tuple[Tensor, Tensor]] = []
        for _ in range(tokens):
            if self.mask is not None:
                self.mask = F.pad(self.mask, (0, 1), value=1)
            out = self.model.model(
                self.last, past_key_values=self.state, use_cache=True, attention_mask=self.mask
            )
            best = self.model.lm_head(out.last_hidden_state[:, -1]).max(-1)
            self.state, self.last = out.past_key_values, best.indices[:, None]
            steps.append((self.last, best.values[:, None]))
        indices, logits = (torch.cat(parts, 1) for parts in zip(*steps, strict=True))
        return indices, logits

    def tensors(self) -> list[Tensor]:
        """All that the next token depends on."""
        return [self.last, *state_tensors([layer.state for layer in self.state.layers])]


class GenerationGraph:
    """`run(tokens)` of a generation as one CUDA graph. It goes on from there by replays alone.

    The same run must have been made before: what compiles or tunes a kernel cannot be captured.
    """

    @torch.inference_mode()
    def __init__(self, generation: GreedyGeneration, tokens: int):
        self.held = generation.tensors()  # what a replay starts from and leaves to the next
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = generation.run(tokens)
            put(generation.tensors(), self.held)

    def replay(self) -> tuple[Tensor, Tensor]:
        """What `run` gives, in tensors that the next replay writes over."""
        self.graph.replay()
        return self.result


def put(values: list[Tensor], places: list[Tensor]) -> None:
    for value, place in zip(values, places, strict=True):
        if value is not place:  # fla replaces recurrent states, and writes convolutions' in place
            place.copy_(value)


def generate(
    model: Any, state: Any, last: Tensor, mask: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The next tokens (batch, 1) and their logits, without end. Each overwrites the one before.

    `mask` (batch, length) is that of the prompts, if some are padded.
    """
    # The state of softmax attention grows with the text, keeps its padding, and fits in no graph.
    grows = not all(hasattr(layer, "state") for layer in state.layers)
    generation = GreedyGeneration(model, state, last, mask if grows else None)
    step: Callable[[], tuple[Tensor, Tensor]] = partial(generation.run, 1)
    if last.is_cuda and not grows:
        # The first step compiles what is new, may be the only one, and says what a step takes.
        first, taken = memory_of(step)
        yield first
        step = GenerationGraph(generation, 1).replay if is_free(taken) else step
    while True:
        yield step()


def memory_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a run, and the bytes of GPU memory that it takes in addition."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return run(), torch.cuda.max_memory_allocated() - before


def is_free(taken: int) -> bool:
    """Whether what a step takes is there once more for its graph, which shares no memory with
    anything else. To ask is the only way: memory that ends inside a capture ends the process."""
    try:
        torch.empty(taken + taken // 4 + MARGIN, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    torch.cuda.empty_cache()
    return True


def state_tensors(state: Any) -> list[Tensor]:
    """The tensors of one layer's state, which may be several in a tuple, or None."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
