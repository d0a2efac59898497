"""DRRQR: the channels whose activations a strong rank-revealing QR keeps; QRCP is its start alone.

M = [K; Q] (2N x d_k) of each head comes as M^T M from the calibration. One factorisation serves
every width. For values, M (N x d_v) is what enters the output projection from a head: the columns
that are dropped are combinations of those that are kept, as nearly as a choice of so many allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from statecut.pruning.method import (
    Activations,
    Method,
    ModelStatistics,
    Option,
    Rows,
    Target,
    Tensor,
)

FACTS = ("kept", "swaps", "largest_gain", "log_volume")


def drrqr(
    model: ModelStatistics,
    target: Target,
    widths: Sequence[int],
    *,
    rows: Rows,
    activations: Activations,
    f: float = math.inf,
) -> list[dict[str, Tensor]]:
    from statecut.pruning.rrqr import pivoted_cholesky, strong_swaps

    gram = model.sum_over(target, lambda side: model.gram(side, rows, activations))
    factor = pivoted_cholesky(gram)
    results = (strong_swaps(factor, width, f) for width in widths)
    return [{fact: getattr(result, fact) for fact in FACTS} for result in results]


ROWS = Option("rows", "sample", "the sample of the calibration, or every token of it",
              choices=("sample", "all"), flag_name="rows-from")  # fmt: skip
ACTIVATIONS = Option("activations", "raw", "keys and queries before or after their L2 norm",
                     choices=("raw", "normalised"))  # fmt: skip
F = Option("f", 1.5, "swaps end when none enlarges the volume more than this", at_least=1)

METHODS = (
    Method("drrqr", label="DRRQR", colour="#2c78fd", needs=("text",), takes=(ROWS, ACTIVATIONS, F),
           values=True,
           about="Keeps the best conditioned activations: a strong rank-revealing QR.",
           choose=drrqr),
    Method("qrcp", label="DRRQR without swaps", colour="#2f93a8", dash=(4, 1, 1, 1),
           needs=("text",), takes=(ROWS, ACTIVATIONS), values=True,
           about="Column-pivoted QR of the activations: where DRRQR starts, without its swaps.",
           choose=drrqr),
)  # fmt: skip
