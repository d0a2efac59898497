"""The kernels of fla that choose their tiles by trying all of them on first use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

OF_RULES = {"H", "K", "BT", "BC"}  # names of arguments that only the delta rules' kernels have


def of_a_rule(tuner: Any) -> bool:
    """Whether it is a kernel of a delta rule, and not of a filter, a norm or an activation."""
    return bool(OF_RULES & set(tuner.keys))


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
