"""Generation with the recurrent state: speed, the state's size, and how many sequences fit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from reproduction.benchmarking.passes import cut_model, random_tokens
from reproduction.benchmarking.record import Reading
from reproduction.benchmarking.timing import Clock, memory_for, out_of_memory, time_runs
from reproduction.config import DecodingBenchmark, Measurement, Model
from reproduction.generation import GenerationGraph, GreedyGeneration, put, state_tensors
from statecut.preflight import default_device, relative_error
from statecut.process import NotMeasured, in_one_line

MIB = 2**20
FINENESS = 64  # the largest batch is found to one part in this many
SEARCH_S = 30.0  # time for that
FEW_TOKENS = 4
TRIES = 4


def readings(
    benchmark: DecodingBenchmark, spec: Model, cell: Measurement, device: str, clock: Clock
) -> Iterator[tuple[str, Reading]]:
    """The figures of one cell, each by its name."""
    model = cut_model(spec, cell, device).eval()
    for batch in many_first(benchmark.batches):
        yield from _speeds(model, benchmark, batch, device, clock)
    yield "state_mib", state_size(model)
    most = _largest_batch(model, max(benchmark.batches), device)
    yield "largest_batch", most
    yield "tokens_per_s_largest", _speed_at(model, most, device)


def tune(benchmark: DecodingBenchmark, spec: Model, cell: Measurement) -> Iterator[int]:
    """Tune and compile the kernels of a step, for one sequence and for many."""
    model = cut_model(spec, cell, default_device()).eval()
    for batch in many_first({1, max(benchmark.batches)}):
        Generation(model, batch, benchmark.prompt).run(2)
        yield batch


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
    generations: list[Generation] = []

    def as_python() -> Reading:
        generations.append(Generation(model, batch, benchmark.prompt))
        return clock(partial(generations[0].run, tokens)).rate(batch * tokens)

    def as_graph() -> Reading:
        if not generations:
            raise NotMeasured(f"out of memory at batch {batch}")
        return clock(capture_graph(generations[0], tokens)).rate(batch * tokens)

    yield f"tokens_per_s_{batch}", _or_reason(as_python, batch)
    graph = Reading.missing("no GPU") if device == "cpu" else _or_reason(as_graph, batch)
    yield f"graph_tokens_per_s_{batch}", graph


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


def _largest_batch(model: Any, start: int, device: str) -> Reading:
    if device == "cpu":
        return Reading.missing("no GPU")

    def peak(batch: int) -> int:
        """Bytes that real steps take, from a prompt of one token."""
        return peak_bytes(lambda: Generation(model, batch, 1).run(FEW_TOKENS))

    def misfit(batch: int) -> str:
        return why_not(partial(peak, batch))

    until = time.monotonic() + SEARCH_S
    free()
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    batch, limit = largest(misfit, first_guess(peak, start, room), until=until)
    if not batch:
        return Reading.missing(f"not even one sequence: {limit}")
    return Reading(batch, note=f"limited by {limit}" if limit else "the search ran out of time")


def _speed_at(model: Any, most: Reading, device: str) -> Reading:
    """Where the state's traffic outweighs everything else. No prompt, few tokens: only they fit,
    and where memory is that full, sometimes a little less than was found to."""
    if most.value is None:
        return most
    for parts in range(FINENESS, FINENESS - TRIES, -1):
        batch = int(most.value) * parts // FINENESS

        def speed(batch: int = batch) -> Reading:
            free()
            run = partial(Generation(model, batch, 1).run, FEW_TOKENS)
            return time_runs(run, device, warmup=0, repeats=3).rate(batch * FEW_TOKENS)

        reading = _or_reason(speed, batch)
        if reading.value is not None:
            return replace(reading, note=f"batch {batch:,}")
    return reading


def free() -> None:
    """Free what failed attempts and dropped graphs still hold."""
    gc.collect()
    torch.cuda.empty_cache()


def peak_bytes(run: Callable[[], object]) -> int:
    """Of a GPU's memory, while something runs on it."""
    free()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def why_not(run: Callable[[], object]) -> str:
    """Why something cannot run, or nothing."""
    try:
        run()
    except RuntimeError as error:
        return "memory" if out_of_memory(error) else in_one_line(error)
    return ""


def first_guess(peak: Callable[[int], int], batch: int, room: int) -> int:
    """The batch that would fill the free memory, extrapolated from two small ones."""
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
