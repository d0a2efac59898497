"""What every section of the configuration is made of: its base, and the types of its values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    WithJsonSchema,
)

from statecut.arguments import LARGEST_SEED

T = TypeVar("T")

PrunedStage = Literal["pre", "refit", "post", "refit_post"]
"""Of a pruned model: sliced, refitted, recovered, refitted and then recovered."""
Stage = Literal["none", PrunedStage]
REFITTED: tuple[Stage, ...] = ("refit", "refit_post")
RECOVERED: tuple[Stage, ...] = ("post", "refit_post")
Pass = Literal["forward", "training"]


def _in_unit_interval(ratio: float) -> float:
    if not 0 < ratio < 1:
        raise ValueError("a ratio must lie in (0, 1)")
    return ratio


def _no_repeats(values: tuple[T, ...]) -> tuple[T, ...]:
    repeated = [value for i, value in enumerate(values) if value in values[:i]]
    if repeated:
        raise ValueError(f"{repeated[0]} stands twice")
    return values


@dataclass(frozen=True)
class NameOf:
    """In Annotated: the value must name one of these (`reproduction.config.checks`)."""

    what: str


# Names become parts of paths and wildcards of the workflow.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
# What statecut.hub takes.
_HUB = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*$"
_SLICE = r"^[\w.-]+/[\w.-]+$"
_SHA256 = r"^[0-9a-f]{64}$"
_COLOUR = r"^#[0-9a-fA-F]{6}$"
_WIDTHS = r"^[1-9]\d*x[1-9]\d*$"
_TEXT = r"\.(jsonl|txt)(\.(xz|gz|zst))?$"
Name = Annotated[str, StringConstraints(pattern=_NAME)]
HubName = Annotated[str, StringConstraints(pattern=_HUB)]
SliceName = Annotated[str, StringConstraints(pattern=_SLICE), NameOf("slices of corpora")]
ModelName = Annotated[Name, NameOf("models")]
MethodName = Annotated[Name, NameOf("methods")]
Sha256 = Annotated[str, StringConstraints(pattern=_SHA256)]
TextFile = Annotated[str, StringConstraints(pattern=_TEXT)]
Colour = Annotated[
    str, StringConstraints(pattern=_COLOUR), Field(description="colour of its curves")
]
# The same in words, for who did not keep to it.
PATTERNS = {
    _NAME: "should be letters, digits and . _ -, with a letter or digit first",
    _HUB: "should be owner/name",
    _SLICE: "should be corpus/slice",
    _SHA256: "should be 64 hexadecimal digits, as sha256sum prints them",
    _WIDTHS: "should be KEYSxVALUES, the channels of a head that stay, as 64x32",
    _COLOUR: "should be # and six hexadecimal digits",
    _TEXT: "should end in .jsonl or .txt, or one of these and .xz, .gz or .zst",
}
Ratio = Annotated[
    float,
    AfterValidator(_in_unit_interval),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
]
Widths = Annotated[str, StringConstraints(pattern=_WIDTHS)]
Cut = Ratio | Widths
"""A fraction of the key channels that is cut, as in the paper; or KEYSxVALUES, the channels of keys
and values of a head that stay."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Fractional = Annotated[float, Field(ge=0, le=1)]
# YAML gives lists; a frozen model keeps tuples. The length stands before the check of repeats, or
# the schema would say minLength, which means nothing for a list.
Many = Annotated[tuple[T, ...], Strict(False), AfterValidator(_no_repeats)]
Some = Annotated[tuple[T, ...], Strict(False), Field(min_length=1), AfterValidator(_no_repeats)]

WHICH: Any = Field(description="chooses the type of this section")


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, and nothing changes once it is read."""

    # Deferred: importing this file must stay cheap, and a run builds only the whole.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that a value may have beside None, stripped of what Annotated adds."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(chain(*map(alternatives, get_args(annotation))))
    return () if annotation is NoneType else (annotation,)
