"""Generation with the recurrent state: speed, the state's size, and how many sequences fit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keycut.benchmarking.machine import default_device, machine
from keycut.benchmarking.model import random_model, random_tokens, relative
from keycut.benchmarking.process import said
from keycut.benchmarking.record import Found
from keycut.benchmarking.timing import out_of_memory, timed
from keycut.config import DecodingBenchmark, Measurement, Model
from keycut.models.generation import GenerationGraph, GreedyGeneration, put, state_tensors

WORDS = (
    "a run generates the given number of tokens for each sequence, greedily, one forward pass of "
    "the model per token with the state of the last; the prompt is not timed; graph_ figures "
    "replay the same run as one CUDA graph, without Python between the kernels"
)
MIB = 2**20
FINENESS = 64  # the largest batch is found to one part in this many
SEARCH_S = 30.0  # time for that
FEW_TOKENS = 4
TRIES = 4


def measure(
    benchmark: DecodingBenchmark,
    spec: Model,
    cell: Measurement,
    device: str | None,
    seconds: float | None,
) -> Iterator[tuple[str, Any]]:
    """The machine, then the figures of one cell, each by its name."""
    device = device or default_device()
    yield "machine", machine(device)
    model = random_model(spec, cell.width, device).eval()
    for batch in many_first(benchmark.batches):
        yield from _speeds(model, benchmark, batch, device, seconds)
    yield "state_mib", state_size(model, device)
    most = _largest_batch(model, max(benchmark.batches), device)
    yield "largest_batch", most
    yield "tokens_per_s_largest", _speed_at(model, most, device)


def tune(benchmark: DecodingBenchmark, spec: Model, cell: Measurement) -> Iterator[int]:
    """Have the kernels of a step tuned and compiled, for one sequence and for many."""
    device = default_device()
    model = random_model(spec, cell.width, device).eval()
    for batch in many_first({1, max(benchmark.batches)}):
        Generation(model, batch, benchmark.prompt, device).run(2)
        yield batch


def many_first(batches: Iterable[int]) -> list[int]:
    """The order in which batches are run.

    fla chooses the tiles of a convolution's step for the first batch that comes, and keeps them for
    all others. With one sequence all are alike, and what wins by chance is slow for hundreds.
    """
    return sorted(batches, reverse=True)


def _speeds(
    model: Any, benchmark: DecodingBenchmark, batch: int, device: str, seconds: float | None
) -> Iterator[tuple[str, Found]]:
    """As Python runs it, and as a graph."""
    tokens = benchmark.tokens
    counts = {"warmup": benchmark.warmup, "repeats": benchmark.repeats}
    generations: list[Generation] = []

    def as_python() -> Found:
        generations.append(Generation(model, batch, benchmark.prompt, device))
        run = partial(generations[0].run, tokens)
        return timed(run, device, **counts, seconds=seconds).rate(batch * tokens)

    def as_graph() -> Found:
        replay = graphed(generations[0], tokens)
        return timed(replay, device, **counts, seconds=seconds).rate(batch * tokens)

    yield f"tokens_per_s_{batch}", _or_reason(as_python, batch)
    graph = Found.missing("no GPU") if device == "cpu" else _or_reason(as_graph, batch)
    yield f"graph_tokens_per_s_{batch}", graph


def _or_reason(measured: Callable[[], Found], batch: int) -> Found:
    """The other figures of a cell do not fall with one."""
    try:
        return measured()
    except RuntimeError as error:
        return Found.missing(f"out of memory at batch {batch}" if out_of_memory(error)
                             else said(error))  # fmt: skip


class Generation(GreedyGeneration):
    """Sequences that go on from a random prompt."""

    @torch.inference_mode()
    def __init__(self, model: Any, batch: int, prompt: int, device: str):
        ids = random_tokens(model.config.vocab_size, batch, prompt, device=device)
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        super().__init__(model, out.past_key_values, out.logits.argmax(-1))


@torch.inference_mode()
def graphed(generation: Generation, tokens: int) -> Callable[[], object]:
    """So many tokens as one graph of kernels; each replay goes on from where the last one ended."""
    start = [tensor.clone() for tensor in generation.tensors()]
    generation.run(tokens)
    expected = [tensor.clone() for tensor in generation.tensors()]
    put(start, generation.tensors())
    graph = GenerationGraph(generation, tokens)
    graph.replay()
    torch.cuda.synchronize()
    apart = max(relative(a, b) for a, b in zip(graph.held[1:], expected[1:], strict=True))
    if not apart < 0.1:  # the same kernels: nothing but rounding may differ
        raise RuntimeError(f"the graph ends in another state, {apart:.2g} from the right one")
    return graph.replay


def state_size(model: Any, device: str) -> Found:
    """MiB of all that is kept of one sequence between two tokens."""
    ids = random_tokens(model.config.vocab_size, 1, 2, device=device)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    sizes: dict[str, float] = {}
    for layer in cache.layers:
        for name, state in layer.state.items():
            sizes[name] = sizes.get(name, 0.0) + sum(map(_bytes, state_tensors(state))) / MIB
    parts = (f"{name} {size:.2f} MiB" for name, size in sizes.items() if size)
    return Found(sum(sizes.values()), note=", ".join(parts))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _largest_batch(model: Any, start: int, device: str) -> Found:
    if device == "cpu":
        return Found.missing("no GPU")

    def peak(batch: int) -> int:
        """Bytes that real steps take, from a prompt of one token."""
        _free()
        torch.cuda.reset_peak_memory_stats()
        Generation(model, batch, 1, device).run(FEW_TOKENS)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def misfit(batch: int) -> str:
        """Why a batch does not fit, or nothing."""
        try:
            peak(batch)
        except RuntimeError as error:
            return "memory" if out_of_memory(error) else said(error)
        return ""

    until = time.monotonic() + SEARCH_S
    _free()
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    batch, limit = largest(misfit, first_guess(peak, start, room), until=until)
    if not batch:
        return Found.missing(f"not even one sequence: {limit}")
    return Found(batch, note=f"limited by {limit}" if limit else "the search ran out of time")


def _speed_at(model: Any, most: Found, device: str) -> Found:
    """Where the state's traffic outweighs everything else. No prompt, few tokens: only they fit,
    and where memory is that full, sometimes a little less than was found to."""
    if most.value is None:
        return most
    for parts in range(FINENESS, FINENESS - TRIES, -1):
        batch = int(most.value) * parts // FINENESS
        found = _or_reason(partial(_largest_speed, model, batch, device), batch)
        if found.value is not None:
            return replace(found, note=f"batch {batch:,}")
    return found


def _largest_speed(model: Any, batch: int, device: str) -> Found:
    _free()
    run = partial(Generation(model, batch, 1, device).run, FEW_TOKENS)
    return timed(run, device, warmup=0, repeats=3).rate(batch * FEW_TOKENS)


def _free() -> None:
    """Give back what failed attempts and dropped graphs still hold."""
    gc.collect()
    torch.cuda.empty_cache()


def first_guess(peak: Callable[[int], int], batch: int, room: int) -> int:
    """The batch that would fill the room, as far as two small ones tell."""
    try:
        few, many = peak(batch), peak(4 * batch)
    except RuntimeError:  # the search finds out why, if it is not memory
        return batch
    return max(batch, batch + int((room - few) * 3 * batch / (many - few)))


def largest(
    misfit: Callable[[int], str], start: int, *, until: float = float("inf")
) -> tuple[int, str]:
    """The largest batch that fits, to one part in FINENESS, and what limits it.

    Goes up or down from `start`, at first by as little as that, until one fits and one does not,
    then halves the gap: two tries if `start` is right. The limit is empty if time ran out before
    anything failed to fit.
    """
    fits, fails, limit = 0, 0, ""
    batch, step = start, max(1, start // (FINENESS + 2))
    while not (fits and fails) and fails != 1 and time.monotonic() < until:
        if why := misfit(batch):
            fails, limit = batch, why
            batch = max(1, batch - step)
        else:
            fits = batch
            batch += step
        step *= 2
    while fits and fails - fits > max(1, fits // FINENESS) and time.monotonic() < until:
        batch = (fits + fails) // 2
        if why := misfit(batch):
            fails, limit = batch, why
        else:
            fits = batch
    return fits, limit
