"""Runs timed one by one, tuning and warm-up left out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from reproduction.benchmarking.record import Runs
from statecut.process import NotMeasured

Clock = Callable[[Callable[[], object]], Runs]  # times the runs of something
FEWEST = 3  # runs, however little time there is


def time_runs(
    run: Callable[[], object],
    device: str,
    *,
    warmup: int,
    repeats: int,
    seconds: float | None = None,
) -> Runs:
    """Seconds of `repeats` runs, each on its own, after a first run that tunes and `warmup` more.

    With `seconds`, fewer of both, so that the runs take about that long, a third of it warm-up.
    """
    run()
    if seconds is not None:
        once = _seconds(run, device, 1)[0]
        warmup = min(warmup, int(seconds / 3 / once))
        repeats = max(FEWEST, min(repeats, int(seconds / once)))
    for _ in range(warmup):
        run()
    lower, median, upper = np.quantile(_seconds(run, device, repeats), [0.25, 0.5, 0.75])
    return Runs(float(median), float(lower), float(upper), repeats, warmup)


def _seconds(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    if device == "cpu":
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return seconds
    # Marks in the GPU's own queue: the runs follow one another as they do in use, and what Python
    # needs to launch the next is hidden as far as it can be.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def free() -> None:
    """Free what failed attempts and dropped graphs still hold."""
    gc.collect()
    torch.cuda.empty_cache()


def peak_bytes(run: Callable[[], object]) -> int:
    """All of a GPU's memory that is allocated at the worst moment of a run, weights included."""
    free()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def out_of_memory(error: BaseException) -> bool:
    # A CPU's allocator has no error class of its own.
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


@contextmanager
def memory_for(batch: int) -> Iterator[None]:
    """Memory that runs out inside is a result that names the batch."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise NotMeasured(f"out of memory at batch {batch}") from error
        raise
