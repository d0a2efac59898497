"""What is found for one cell of a benchmark: numbers, or the reason why there is none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keycut.artefact import read_json, write_json
from keycut.config import Config, DecodingBenchmark, Measurement, ModelBenchmark
from keycut.errors import InputError


@dataclass(frozen=True)
class Runs:
    """Seconds of the timed runs."""

    median: float
    lower: float  # quartiles
    upper: float
    repeats: int
    warmup: int

    @property
    def stderr(self) -> float:
        """Of the median: 1.25 standard deviations over the root of the runs, and a standard
        deviation is 0.74 of the distance between the quartiles."""
        return 1.2533 * (self.upper - self.lower) / 1.349 / self.repeats**0.5

    def rate(self, amount: float) -> Found:
        """How much of something passes in a second."""
        value = amount / self.median
        return Found(value, value * self.stderr / self.median, runs=self)


@dataclass(frozen=True)
class Found:
    """One number, or why there is none."""

    value: float | None = None
    stderr: float | None = None
    reason: str = ""
    note: str = ""
    runs: Runs | None = None

    @classmethod
    def missing(cls, why: str) -> Found:
        return cls(reason=f"not measured: {why}")


@dataclass(frozen=True)
class Measured:
    """One cell: what it is, its figures by the names of metrics, and what was used."""

    cell: Measurement
    results: dict[str, Found]
    timed: str  # what one run is, in words
    settings: dict[str, Any]  # of the benchmark, as in the configuration
    machine: dict[str, Any]  # device, gpu, driver, backend, versions
    seconds: float = 0.0

    def write(self, path: Path | str) -> None:
        write_json(path, asdict(self))


def metrics(config: Config, cell: Measurement) -> tuple[str, ...]:
    """Everything that a cell is measured for."""
    benchmark = config.benchmarks[cell.benchmark]
    if isinstance(benchmark, DecodingBenchmark):
        return (*benchmark.speeds(), "state_mib", "largest_batch", "tokens_per_s_largest")
    if isinstance(benchmark, ModelBenchmark) and benchmark.graphs(cell.does):
        return ("tokens_per_s", "graph_tokens_per_s", "peak_memory_gib")
    return ("tokens_per_s", "peak_memory_gib")


def read(path: Path | str) -> Measured:
    """What `Measured.write` wrote."""
    record = read_json(path)
    try:
        return from_json(record)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a measurement of Keycut ({error!r})") from None


def from_json(record: dict[str, Any]) -> Measured:
    known = {name: value for name, value in record.items() if name != "tuning"}  # of old ones
    cell, results = Measurement(**record["cell"]), _all_found(record["results"])
    return Measured(**known | {"cell": cell, "results": results})


def _all_found(results: dict[str, Any]) -> dict[str, Found]:
    return {
        metric: Found(**found | {"runs": found["runs"] and Runs(**found["runs"])})
        for metric, found in results.items()
    }
