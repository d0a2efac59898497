"""Speed on the machine at hand: `measure` times a cell of a benchmark in a process of its own."""

from reproduction.benchmarking.cell import measure
from reproduction.benchmarking.record import CellRecord, Reading, Runs, read

__all__ = ["CellRecord", "Reading", "Runs", "measure", "read"]
