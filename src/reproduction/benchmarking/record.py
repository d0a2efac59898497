"""The record of one cell of a benchmark: numbers, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reproduction.config import Config, DecodingBenchmark, Measurement, ModelBenchmark


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

    def rate(self, amount: float) -> Reading:
        """How much of something passes in a second."""
        value = amount / self.median
        return Reading(value, value * self.stderr / self.median, runs=self)


@dataclass(frozen=True)
class Reading:
    """One number, or why there is none."""

    value: float | None = None
    stderr: float | None = None
    reason: str = ""
    note: str = ""
    runs: Runs | None = None

    @classmethod
    def missing(cls, why: str) -> Reading:
        return cls(reason=f"not measured: {why}")


@dataclass(frozen=True)
class CellRecord:
    """One cell: what it is, its figures by the names of metrics, and what was used."""

    cell: Measurement
    results: dict[str, Reading]
    timed: str  # what one run is, in words
    settings: dict[str, Any]  # of the benchmark, as in the configuration
    machine: dict[str, Any]  # device, gpu, driver, backend, versions
    seconds: float = 0.0


def metrics(config: Config, cell: Measurement) -> tuple[str, ...]:
    """Everything that a cell is measured for."""
    benchmark = config.benchmarks[cell.benchmark]
    if isinstance(benchmark, DecodingBenchmark):
        return (*benchmark.speeds(), "state_mib", "largest_batch")
    if isinstance(benchmark, ModelBenchmark) and benchmark.graphs(cell.mode):
        return ("tokens_per_s", "graph_tokens_per_s", "peak_memory_gib")
    return ("tokens_per_s", "peak_memory_gib")


def from_json(record: dict[str, Any]) -> CellRecord:
    # Old ones have `tuning`, and say `does` for the mode of a cell.
    fields = {name: value for name, value in record.items() if name != "tuning"}
    cell = {"mode" if name == "does" else name: value for name, value in record["cell"].items()}
    results = {
        metric: Reading(**reading | {"runs": (runs := reading.get("runs")) and Runs(**runs)})
        for metric, reading in record["results"].items()
    }
    return CellRecord(**fields | {"cell": Measurement(**cell), "results": results})
