"""Generation with the recurrent state: speed, the state's size, and how many sequences fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from keycut.benchmarking.machine import default_device, machine
from keycut.benchmarking.model import random_model, random_tokens
from keycut.benchmarking.process import said
from keycut.benchmarking.record import Found
from keycut.benchmarking.timing import out_of_memory, timed
from keycut.benchmarking.tuning import Tuning
from keycut.config import DecodingBenchmark, Measurement, Model

WORDS = (
    "a run generates the given number of tokens for each sequence, greedily, one forward pass of "
    "the model per token with the state of the last; the prompt is not timed"
)
MIB = 2**20
FINENESS = 64  # the largest batch is found to one part in this many
SEARCH_S = 120.0  # time for that


def measure(
    benchmark: DecodingBenchmark,
    spec: Model,
    cell: Measurement,
    device: str | None,
    tuning: Tuning,
    seconds: float | None,
) -> Iterator[tuple[str, Any]]:
    """The machine, then the figures of one cell, each by its name."""
    device = device or default_device()
    yield "machine", machine(device)
    model = random_model(spec, cell.width, device).eval()
    tuning.apply()
    for batch in benchmark.batches:
        yield f"tokens_per_s_{batch}", _speed(model, benchmark, batch, device, seconds)
    yield "state_mib", state_size(model, device)
    yield "largest_batch", _largest_batch(model, max(benchmark.batches), device)


def tune(
    benchmark: DecodingBenchmark, spec: Model, cell: Measurement, tuning: Tuning
) -> Iterator[int]:
    """Have the kernels of a step tuned and compiled, for one sequence and for many."""
    device = default_device()
    model = random_model(spec, cell.width, device).eval()
    tuning.apply()
    for batch in sorted({1, max(benchmark.batches)}):
        generation(model, batch, benchmark.prompt, 2, device)()
        yield batch


def _speed(
    model: Any, benchmark: DecodingBenchmark, batch: int, device: str, seconds: float | None
) -> Found:
    try:
        generate = generation(model, batch, benchmark.prompt, benchmark.tokens, device)
        runs = timed(
            generate, device, warmup=benchmark.warmup, repeats=benchmark.repeats, seconds=seconds
        )
    except RuntimeError as error:
        if out_of_memory(error):
            return Found.missing(f"out of memory at batch {batch}")
        raise
    return runs.rate(batch * benchmark.tokens)


@torch.inference_mode()
def generation(
    model: Any, batch: int, prompt: int, tokens: int, device: str
) -> Callable[[], Tensor]:
    """A function that generates so many more tokens (batch, tokens), going on from the last."""
    ids = random_tokens(model.config.vocab_size, batch, prompt, device=device)
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    state, last = out.past_key_values, out.logits.argmax(-1)  # (batch, 1)

    @torch.inference_mode()
    def generate() -> Tensor:
        nonlocal state, last
        found = []
        for _ in range(tokens):
            out = model(input_ids=last, past_key_values=state, use_cache=True)
            state, last = out.past_key_values, out.logits.argmax(-1)
            found.append(last)
        return torch.cat(found, 1)

    return generate


def state_size(model: Any, device: str) -> Found:
    """MiB of all that is kept of one sequence between two tokens."""
    ids = random_tokens(model.config.vocab_size, 1, 2, device=device)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    sizes: dict[str, float] = {}
    for layer in cache.layers:
        for name, state in layer.state.items():
            sizes[name] = sizes.get(name, 0.0) + sum(map(_bytes, _tensors(state))) / MIB
    parts = (f"{name} {size:.2f} MiB" for name, size in sizes.items() if size)
    return Found(sum(sizes.values()), note=", ".join(parts))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from _tensors(part)


def _largest_batch(model: Any, start: int, device: str) -> Found:
    if device == "cpu":
        return Found.missing("no GPU")

    def misfit(batch: int) -> str:
        """Why a batch does not fit, or nothing: two real steps from a prompt of one token."""
        try:
            generation(model, batch, 1, 2, device)()
            torch.cuda.synchronize()
        except RuntimeError as error:
            return "memory" if out_of_memory(error) else said(error)
        finally:
            torch.cuda.empty_cache()
        return ""

    batch, limit = largest(misfit, start, until=time.monotonic() + SEARCH_S)
    if not batch:
        return Found.missing(f"not even one sequence: {limit}")
    return Found(batch, note=f"limited by {limit}" if limit else "the search ran out of time")


def largest(
    misfit: Callable[[int], str], start: int, *, until: float = float("inf")
) -> tuple[int, str]:
    """The largest batch that fits, to one part in FINENESS, and what limits it.

    Doubles or halves from `start` until one fits and one does not, then halves the gap. The limit
    is empty if time ran out before anything failed to fit.
    """
    fits, fails, limit = 0, 0, ""
    batch = start
    while batch and not (fits and fails) and time.monotonic() < until:
        if why := misfit(batch):
            fails, limit = batch, why
            batch //= 2
        else:
            fits = batch
            batch *= 2
    while fits and fails - fits > max(1, fits // FINENESS) and time.monotonic() < until:
        batch = (fits + fails) // 2
        if why := misfit(batch):
            fails, limit = batch, why
        else:
            fits = batch
    return fits, limit
