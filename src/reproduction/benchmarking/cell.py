"""One cell of a benchmark, measured and written down, also when there is nothing to measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.benchmarking.record import CellRecord, Reading, metrics
from reproduction.config import Config, Measurement, Model
from statecut.files import write_json
from statecut.process import run_work

LIMIT_S = 3000.0  # less than the hour that its job has, or nobody would write down the reason

# What one run of a cell is.
RUNS = {
    ("mixer", "forward"): "forward pass of the layer, without gradients",
    ("mixer", "training"): "forward and backward pass of the layer, gradients of its input and "
    "weights, without optimizer",
    ("model", "forward"): "forward pass of the model with the logits of all positions, without "
    "gradients or cache; graph_ figures replay it as one CUDA graph, without Python between the "
    "kernels",
    ("model", "training"): "forward and backward pass of the model with its loss, gradients of all "
    "weights, without optimizer or recomputation",
    ("decoding", "decoding"): "a run generates the given number of tokens for each sequence, "
    "greedily, one forward pass of the model per token with the state of the last; the prompt is "
    "not timed; graph_ figures replay the same run as one CUDA graph, without Python between the "
    "kernels",
}


def measure(
    config: Config,
    cell: Measurement,
    out: Path | str,
    *,
    device: str | None = None,
    limit_s: float = LIMIT_S,
    seconds: float | None = None,
) -> CellRecord:
    """Time one of `config.measurements()` and write it to `out` as JSON.

    A shape that its kernels cannot train leaves the reason as its result. On a GPU it runs in a
    process of its own. `seconds` bounds the timed runs.
    """
    from statecut.preflight import default_device

    device = device or default_device()
    benchmark = config.benchmarks[cell.benchmark]
    outcome = run_work(
        readings, benchmark, config.models.get(cell.subject), cell, device, seconds,
        limit_s=limit_s, own_process=device == "cuda",
    )  # fmt: skip
    values = dict(outcome.values)
    missing = Reading.missing(outcome.reason or "no GPU")
    record = CellRecord(
        cell=cell,
        results={metric: values.get(metric, missing) for metric in metrics(config, cell)},
        timed=RUNS[benchmark.kind, cell.mode],
        settings=benchmark.model_dump(mode="json"),
        machine=values.get("machine", {}),
        seconds=outcome.seconds,
    )
    write_json(out, asdict(record))
    return record


def readings(
    benchmark: Any, spec: Model | None, cell: Measurement, device: str, seconds: float | None
) -> Iterator[tuple[str, Any]]:
    """The machine, then the figures of one cell, each by its name."""
    from reproduction.benchmarking import decoding, passes
    from reproduction.benchmarking.timing import time_runs
    from statecut.preflight import machine

    yield "machine", machine(device)
    runs = {"warmup": benchmark.warmup, "repeats": benchmark.repeats, "seconds": seconds}
    kind = decoding if benchmark.kind == "decoding" else passes
    yield from kind.readings(
        benchmark, spec, cell, device, partial(time_runs, device=device, **runs)
    )
