"""fla's kernels choose their tiles by trying all of them on first use, for minutes.

Triton keeps each choice on disk under a key of the kernel's arguments: head counts and widths, but
neither batch nor length. So a choice that was right for another length would be taken over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Names of arguments that change a grid, not a tile; and names that only the delta rules have.
COUNTS = {"B", "H", "HV", "NB"}
OF_RULES = {"H", "K", "BT", "BC"}
QUICK_MS = (5, 20)  # Triton's own: 25 of warm-up and 100 of runs


@dataclass(frozen=True)
class Tuning:
    """How tiles are chosen. The default is fla's own way, for each length apart."""

    share_heads: bool = False  # a choice made for one number of heads serves all
    quick: bool = False  # a fifth of Triton's time for each candidate
    keep: bool = True  # choices are kept on disk and taken from there
    by_length: bool = True

    def apply(self) -> None:
        """To all kernels that are imported in this process."""
        for tuner in tuners():
            keys = list(tuner.keys)
            if self.by_length and of_a_rule(tuner) and "T" in set(tuner.arg_names) - set(keys):
                keys.append("T")
            if self.share_heads:
                keys = [name for name in keys if name not in COUNTS]
            tuner.keys = keys
            if self.quick:
                tuner._do_bench = _quick
            tuner.cache_results = self.keep


def of_a_rule(tuner: Any) -> bool:
    """Whether it is a kernel of a delta rule, and not of a filter, a norm or an activation."""
    return bool(OF_RULES & set(tuner.keys))


def _quick(call: Any, quantiles: Any) -> Any:
    from triton.testing import do_bench

    return do_bench(call, warmup=QUICK_MS[0], rep=QUICK_MS[1], quantiles=quantiles)


def tuners() -> Iterator[Any]:
    """The tuned kernels among the modules of fla that are imported."""
    from triton.runtime.autotuner import Autotuner

    seen: set[int] = set()
    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    for module in modules:
        for value in list(vars(module).values()):
            while value is not None and type(value).__module__.startswith(("triton.", "fla.")):
                if isinstance(value, Autotuner) and id(value) not in seen:
                    seen.add(id(value))
                    yield value
                value = getattr(value, "fn", None)
