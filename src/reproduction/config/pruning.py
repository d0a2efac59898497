"""How channels are chosen, and how many are left."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, Strict, create_model

from reproduction.config.section import WHICH, Colour, Section, SliceName
from statecut.arguments import Target
from statecut.pruning.method import Method
from statecut.pruning.methods import METHODS

Label = Annotated[str, Field(description="name in tables and figures")]
Dash = Annotated[
    tuple[PositiveFloat, ...],
    Strict(False),
    Field(description="strokes and gaps of its curves, in points; solid without"),
]

BASELINE = "baseline"
"""The method of a variant that nothing was cut from, as in the published numbers."""


class CalibrationText(Section):
    """The text that scores are computed on, once per model and seed."""

    data: SliceName = Field(description="where its sequences are drawn from, as corpus/slice")
    sequences: PositiveInt = Field(description="number of sequences")
    rows: PositiveInt = Field(description="rows of keys, and of queries, in the sample of methods")


class MethodBase(Section):
    """What the configuration says of any method, beside the options that it takes."""

    algorithm: str = WHICH
    label: Label
    target: Target
    colour: Colour
    dash: Dash

    @property
    def options(self) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in METHODS[self.algorithm].takes}

    @property
    def calibrated(self) -> bool:
        return "text" in METHODS[self.algorithm].needs

    @property
    def needs_gradients(self) -> bool:
        return "gradients" in METHODS[self.algorithm].needs

    @property
    def drawn(self) -> bool:
        """Whether another seed may give another selection."""
        return self.calibrated or "seed" in METHODS[self.algorithm].needs


def _section(method: Method) -> type[MethodBase]:
    """What the configuration may say of a method, from what its file says."""
    return create_model(  # type: ignore[call-overload]
        method.name,
        __base__=MethodBase,
        __doc__=method.about,
        algorithm=(Literal[method.name], WHICH),
        label=(Label, method.label),
        target=(
            Literal[method.targets],
            Field(method.targets[0], description="what it judges by, unless a table asks for "
                  "others: keys, queries or both"),
        ),
        colour=(Colour, method.colour),
        dash=(Dash, method.dash),
        **{
            option.name: (
                Literal[option.choices] if option.choices else type(option.default),
                Field(option.default, description=option.help, ge=option.at_least),
            )
            for option in method.takes
        },
    )  # fmt: skip


if TYPE_CHECKING:
    PruningMethod = MethodBase
else:
    PruningMethod = Annotated[
        reduce(or_, map(_section, METHODS.values())), Field(discriminator="algorithm")
    ]
