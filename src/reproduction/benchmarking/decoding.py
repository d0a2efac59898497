"""Generation with the recurrent state: speed, the state's size, and how many sequences fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch

from reproduction.benchmarking.passes import cut_model, random_tokens
from reproduction.benchmarking.record import Reading
from reproduction.benchmarking.timing import (
    Clock,
    memory_for,
    out_of_memory,
    peak_bytes,
)
from reproduction.config import DecodingBenchmark, Measurement, Model
from reproduction.generation import GenerationGraph, GreedyGeneration, put, state_tensors
from statecut.preflight import relative_error
from statecut.process import NotMeasured, in_one_line

MIB = 2**20
FINENESS = 64  # the largest batch is found to one part in this many
FEW_TOKENS = 4


def readings(
    benchmark: DecodingBenchmark, spec: Model, cell: Measurement, device: str, clock: Clock
) -> Iterator[tuple[str, Reading]]:
    """The figures of one cell, each by its name."""
    model = cut_model(spec, cell, device).eval()
    for batch in many_first(benchmark.batches):
        yield from _speeds(model, benchmark, batch, device, clock)
    yield "state_mib", state_size(model)
    if device == "cuda":
        yield "largest_batch", _largest_batch(model, max(benchmark.batches))


def many_first(batches: Iterable[int]) -> list[int]:
    """The order in which batches are run.

    fla chooses the tiles of a convolution's step for the first batch that comes, and keeps them for
    all others. With one sequence all are alike, and what wins by chance is slow for hundreds.
    """
    return sorted(batches, reverse=True)


def _speeds(
    model: Any, benchmark: DecodingBenchmark, batch: int, device: str, clock: Clock
) -> Iterator[tuple[str, Reading]]:
    """As Python runs it, and as a graph."""
    tokens = benchmark.tokens

    @cache
    def generation() -> Generation:
        return Generation(model, batch, benchmark.prompt)

    def as_python() -> Reading:
        return clock(partial(generation().run, tokens)).rate(batch * tokens)

    def as_graph() -> Reading:
        return clock(capture_graph(generation(), tokens)).rate(batch * tokens)

    yield f"tokens_per_s_{batch}", _or_reason(as_python, batch)
    if device == "cuda":
        yield f"graph_tokens_per_s_{batch}", _or_reason(as_graph, batch)


def _or_reason(read: Callable[[], Reading], batch: int) -> Reading:
    """One figure that cannot be measured does not end the others of its cell."""
    try:
        with memory_for(batch):
            return read()
    except (RuntimeError, NotMeasured) as error:
        return Reading.missing(in_one_line(error))


class Generation(GreedyGeneration):
    """Sequences that go on from a random prompt."""

    @torch.inference_mode()
    def __init__(self, model: Any, batch: int, prompt: int):
        ids = random_tokens(model, batch, prompt)
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        super().__init__(model, out.past_key_values, out.logits.argmax(-1))


@torch.inference_mode()
def capture_graph(generation: Generation, tokens: int) -> Callable[[], object]:
    """So many tokens as one graph of kernels; each replay goes on from where the last one ended."""
    start = [tensor.clone() for tensor in generation.tensors()]
    generation.run(tokens)
    expected = [tensor.clone() for tensor in generation.tensors()]
    put(start, generation.tensors())
    graph = GenerationGraph(generation, tokens)
    graph.replay()
    torch.cuda.synchronize()
    error = max(relative_error(a, b) for a, b in zip(graph.held[1:], expected[1:], strict=True))
    if not error < 0.1:  # the same kernels: nothing but rounding may differ
        raise RuntimeError(f"the graph ends in another state, {error:.2g} from the right one")
    return graph.replay


def state_size(model: Any) -> Reading:
    """MiB of all that is kept of one sequence between two tokens."""
    with torch.inference_mode():
        cache = model(input_ids=random_tokens(model, 1, 2), use_cache=True).past_key_values
    sizes: dict[str, float] = {}
    for layer in cache.layers:
        for name, state in layer.state.items():
            size = sum(tensor.nbytes for tensor in state_tensors(state))
            sizes[name] = sizes.get(name, 0.0) + size / MIB
    parts = (f"{name} {size:.2f} MiB" for name, size in sizes.items() if size)
    return Reading(sum(sizes.values()), note=", ".join(parts))


def _largest_batch(model: Any, start: int) -> Reading:
    def misfit(batch: int) -> str:
        """Why real steps, from a prompt of one token, do not run."""
        return why_not(lambda: peak_bytes(lambda: Generation(model, batch, 1).run(FEW_TOKENS)))

    batch, limit = largest(misfit, start)
    if not batch:
        return Reading.missing(f"not even one sequence: {limit}")
    return Reading(batch, note=f"limited by {limit}")


def why_not(run: Callable[[], object]) -> str:
    """Why something cannot run, or nothing."""
    try:
        run()
    except RuntimeError as error:
        return "memory" if out_of_memory(error) else in_one_line(error)
    return ""


def largest(misfit: Callable[[int], str], start: int) -> tuple[int, str]:
    """The largest batch that fits, to one part in FINENESS, and what limits it: doubles `start`
    until one does not fit, then halves the gap."""
    fits, fails, limit, batch = 0, 0, "", start
    while not fails or fails - fits > max(1, fits // FINENESS):
        if why := misfit(batch):
            fails, limit = batch, why
        else:
            fits = batch
        batch = (fits + fails) // 2 if fails else 2 * fits
    return fits, limit
