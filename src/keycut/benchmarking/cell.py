"""One cell of a benchmark, measured and written down, also when there is nothing to measure."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keycut.artefact import refuse_unwritable
from keycut.benchmarking.process import Outcome, Worker, apart_by_default, here
from keycut.benchmarking.record import Found, Measured, Padded, metrics
from keycut.benchmarking.tuning import Tuning
from keycut.config import Config, DecodingBenchmark, Measurement, MixerBenchmark
from keycut.errors import InputError

if TYPE_CHECKING:
    from keycut.benchmarking.preflight import Verdict

LIMIT_S = 3600.0


def measure(
    config: Config,
    cell: Measurement,
    out: Path | str,
    *,
    device: str | None = None,
    limit_s: float = LIMIT_S,
    verdict: Verdict | None = None,
    apart: bool | None = None,
    tuning: Tuning | None = None,
    seconds: float | None = None,
    worker: Worker | None = None,
) -> Measured:
    """Time one of `config.measurements()` and write it to `out` as JSON.

    `verdict` is the preflight's of this rule and width: a width that does not train is not tried,
    and measured at the width to pad to instead, under a name of its own. `apart` is a process of
    its own (by default where there is a GPU, which a crash would poison), `worker` one that was
    started before; `seconds` bounds the timed runs.
    """
    if cell not in config.measurements(cell.benchmark):
        raise InputError(f"{cell}: no measurement of {config.run}; see Config.measurements()")
    refuse_unwritable(out)
    tuning = tuning or Tuning()
    apart = apart_by_default() if apart is None else apart

    def work(cell: Measurement) -> Outcome:
        function, *given = _work(config, cell)
        given += [cell, device, tuning, seconds]
        if not apart:
            return here(function, *given)
        return (worker or Worker(())).run(function, *given, limit_s=limit_s)

    padded = None
    if cell.trains and verdict is not None and not verdict.trains:
        why = f"the kernel does not train at d_k {cell.width} ({verdict.verdict})"
        outcome = Outcome([], why, 0.0)
        if verdict.padded_to is not None:
            outcome = work(replace(cell, width=verdict.padded_to))
            padded = Padded(verdict.padded_to, _results(config, cell, outcome))
            outcome = replace(outcome, found=outcome.found[:1], reason=why)
    else:
        outcome = work(cell)
    found = dict(outcome.found)
    measured = Measured(
        cell=cell,
        results=_results(config, cell, outcome),
        padded=padded,
        timed=words(config, cell),
        settings=config.benchmarks[cell.benchmark].model_dump(mode="json"),
        machine=found.get("machine", {}),
        tuning=asdict(tuning),
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
