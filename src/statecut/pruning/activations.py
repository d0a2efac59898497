"""Which activations of a calibration a method looks at."""

from __future__ import annotations

from typing import Literal

Activations = Literal["raw", "normalised"]
"""As the delta rule receives them, or after their L2 norm."""
Rows = Literal["all", "sample"]
"""Of all tokens, or of the paper's random sample of them."""
Side = Literal["k", "q", "v"]
