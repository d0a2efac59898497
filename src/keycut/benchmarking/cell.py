"""One cell of a benchmark, measured and written down, also when there is nothing to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keycut.artefact import check_writable
from keycut.benchmarking.process import Outcome, Worker, apart_by_default, here
from keycut.benchmarking.record import Found, Measured, metrics
from keycut.config import Config, DecodingBenchmark, Measurement, MixerBenchmark
from keycut.errors import InputError

LIMIT_S = 3000.0  # less than the hour that its job has, or nobody would write down the reason


def measure(
    config: Config,
    cell: Measurement,
    out: Path | str,
    *,
    device: str | None = None,
    limit_s: float = LIMIT_S,
    apart: bool | None = None,
    seconds: float | None = None,
    worker: Worker | None = None,
) -> Measured:
    """Time one of `config.measurements()` and write it to `out` as JSON.

    A shape that its kernels cannot train leaves the reason as its result. `apart` is a process of
    its own (by default where there is a GPU, which a crash would poison), `worker` one that was
    started before; `seconds` bounds the timed runs.
    """
    if cell not in config.measurements(cell.benchmark):
        raise InputError(f"{cell}: no measurement of {config.run}; see Config.measurements()")
    check_writable(out)
    apart = apart_by_default() if apart is None else apart

    function, *given = _work(config, cell)
    given += [cell, device, seconds]
    if apart:
        outcome = (worker or Worker(())).run(function, *given, limit_s=limit_s)
    else:
        outcome = here(function, *given)
    found = dict(outcome.found)
    measured = Measured(
        cell=cell,
        results=_results(config, cell, outcome),
        timed=words(config, cell),
        settings=config.benchmarks[cell.benchmark].model_dump(mode="json"),
        machine=found.get("machine", {}),
        seconds=outcome.seconds,
    )
    measured.write(out)
    return measured


def _work(config: Config, cell: Measurement) -> list[Any]:
    """The function that measures a cell, and what it is given first."""
    from keycut.benchmarking import decoding, mixer, model

    benchmark = config.benchmarks[cell.benchmark]
    if isinstance(benchmark, MixerBenchmark):
        return [mixer.measure, benchmark]
    function = decoding.measure if isinstance(benchmark, DecodingBenchmark) else model.measure
    return [function, benchmark, config.models[cell.subject]]


def _results(config: Config, cell: Measurement, outcome: Outcome) -> dict[str, Found]:
    found = dict(outcome.found)
    missing = Found.missing(outcome.reason)
    return {metric: found.get(metric, missing) for metric in metrics(config, cell)}


def words(config: Config, cell: Measurement) -> str:
    """What one run of a cell is."""
    from keycut.benchmarking import decoding, mixer, model

    if cell.does == "decoding":
        return decoding.WORDS
    kind = config.benchmarks[cell.benchmark].kind
    return (mixer if kind == "mixer" else model).WORDS[cell.does]
