"""Speed on the machine at hand, and whether its kernels can be trusted at all.

`measure` times one cell of a benchmark, `preflight.check_shape` checks one shape of a delta rule.
Both work in processes of their own: a kernel that crashes poisons whatever comes after it.
"""

from reproduction.benchmarking.cell import measure
from reproduction.benchmarking.record import CellRecord, Reading, Runs, read

__all__ = ["CellRecord", "Reading", "Runs", "measure", "read"]
