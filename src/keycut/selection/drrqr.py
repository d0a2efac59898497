"""DRRQR: the channels whose activations a strong rank-revealing QR keeps; QRCP is its start alone.

M = [K; Q] (2N x d_k) of each head comes as M^T M from the calibration. One factorisation serves
every width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from keycut.selection.evidence import Evidence
from keycut.selection.rrqr import StrongRRQR, pivoted_cholesky, strong_swaps


def choose(evidence: Evidence, widths: Sequence[int], *, swap: bool) -> list[StrongRRQR]:
    method = "drrqr" if swap else "qrcp"
    factor = pivoted_cholesky(evidence.gram(method, evidence.rows, evidence.activations))
    return [strong_swaps(factor, width, evidence.f if swap else math.inf) for width in widths]
