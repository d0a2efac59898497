"""Evaluation: suites of lm-eval tasks on a model folder, by a protocol that cannot drift.

`evaluate` is the whole of it: it refuses what deviates from the configuration, runs what is not
done yet, and writes one JSON. `make_demo_tasks` makes the demo's tasks from its own text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keycut.evaluation.demo import make_demo_tasks
    from keycut.evaluation.suite import evaluate

__all__ = ["evaluate", "make_demo_tasks"]


def __getattr__(name: str) -> Any:
    # Both import numpy, the first also torch and lm-eval: only for those who call them.
    if name == "evaluate":
        from keycut.evaluation.suite import evaluate

        return evaluate
    if name == "make_demo_tasks":
        from keycut.evaluation.demo import make_demo_tasks

        return make_demo_tasks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
