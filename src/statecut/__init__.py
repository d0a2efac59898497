"""Statecut: fewer key and value channels in trained linear-attention language models.

    import statecut

    statecut.prune("path/to/model", "smaller", ratio=0.5, text="corpus.jsonl")

or step by step, with models in memory:

    model = statecut.load("path/to/model")
    tokens = statecut.tokenize("corpus.jsonl", "path/to/model", sequences=128, length=2048)
    calibration = statecut.calibrate(model, tokens)
    kept = statecut.select(model, calibration, method="fisher", keys=64)
    smaller = statecut.slice(model, kept)
    statecut.refit(smaller, model, tokens)
    statecut.save(smaller, "smaller")

Importing this package is cheap: torch, transformers and flash-linear-attention are imported by the
functions that need them.
"""

from typing import TYPE_CHECKING, Any

from statecut.api import (
    calibrate,
    evaluate,
    inspect,
    load,
    perplexity,
    prune,
    recover,
    refit,
    save,
    select,
    slice,
    tokenize,
)
from statecut.errors import InputError
from statecut.version import __version__

if TYPE_CHECKING:
    from statecut.evaluation.evaluate import Evaluation
    from statecut.pruning.calibration import Calibration
    from statecut.pruning.prune import Pruned
    from statecut.pruning.refit import Refit
    from statecut.pruning.selection import Selection
    from statecut.serving.inspection import Inspection

TYPES = {
    "Calibration": "pruning.calibration",
    "Evaluation": "evaluation.evaluate",
    "Inspection": "serving.inspection",
    "Pruned": "pruning.prune",
    "Refit": "pruning.refit",
    "Selection": "pruning.selection",
}
"""What functions return, and where it stands: imported when it is first used."""


def __getattr__(name: str) -> Any:
    if name not in TYPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{TYPES[name]}"), name)


__all__ = [
    "Calibration",
    "Evaluation",
    "InputError",
    "Inspection",
    "Pruned",
    "Refit",
    "Selection",
    "__version__",
    "calibrate",
    "evaluate",
    "inspect",
    "load",
    "perplexity",
    "prune",
    "recover",
    "refit",
    "save",
    "select",
    "slice",
    "tokenize",
]
