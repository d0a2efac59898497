"""How channels are chosen, and how many are left."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from keycut.config.section import WHICH, Section, SliceName, Target
from keycut.errors import InputError

BASELINE = "baseline"
"""The method of a variant that nothing was cut from, as in the published numbers."""


def width(d_k: int, ratio: float | str | Decimal | Fraction) -> int:
    """Channels left of `d_k` after cutting `ratio`: floor(d_k (1 - ratio)), in exact arithmetic.

    The ratio is what its decimal text says: in floating point 10 * (1 - 0.9) is below 1.
    """
    try:
        exact = Fraction(str(ratio))
    except ValueError:  # nan or an infinity
        exact = None
    if exact is None or not 0 <= exact < 1:
        raise InputError(f"ratio {ratio}: must lie in (0, 1), or be 0 for a model left whole")
    left = int(d_k * (1 - exact))
    if left < 1:
        raise InputError(f"ratio {ratio} leaves no channel of {d_k}; choose a smaller one")
    return left


class Calibration(Section):
    """The text that scores are computed on, once per model and seed."""

    data: SliceName = Field(description="where its sequences are drawn from, as corpus/slice")
    sequences: PositiveInt = Field(description="number of sequences")
    rows: PositiveInt = Field(
        description="rows of keys, and as many of queries, in the sample that methods with "
        "`rows: sample` see"
    )


class MethodBase(Section):
    label: str = Field(description="name in tables and figures")
    target: Target = Field(
        "kq", description="what is scored, unless a table asks for others: keys, queries or both"
    )

    @property
    def calibrated(self) -> bool:
        return True

    @property
    def drawn(self) -> bool:
        """Whether another seed may give another selection."""
        return self.calibrated


class Weighted(MethodBase):
    """Methods of the weights alone: their magnitude, or chance."""

    algorithm: Literal["l1", "rand"] = WHICH

    @property
    def calibrated(self) -> bool:
        return False

    @property
    def drawn(self) -> bool:
        return self.algorithm == "rand"


class Calibrated(MethodBase):
    """Methods of weights and calibration, without options."""

    algorithm: Literal["s_wanda", "grad", "pca_proper", "pca_adversarial"] = WHICH


class FactoredBase(MethodBase):
    rows: Literal["sample", "all"] = Field(
        "sample", description="the sample of the calibration, or every token of it"
    )
    activations: Literal["raw", "normalised"] = Field(
        "raw", description="keys and queries before or after their L2 norm"
    )


class Pivoted(FactoredBase):
    """Column-pivoted QR of the activations: where DRRQR starts, without its swaps."""

    algorithm: Literal["qrcp"] = WHICH


class Swapped(FactoredBase):
    """Strong rank-revealing QR of the activations."""

    algorithm: Literal["drrqr"] = WHICH
    f: float = Field(
        1.5, description="swaps end when none enlarges the volume more than this", ge=1
    )


Method = Annotated[Weighted | Calibrated | Pivoted | Swapped, Field(discriminator="algorithm")]
