"""What every section of the configuration is made of: its base, and the types of its values."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    model_validator,
)

from statecut.arguments import LARGEST_SEED
from statecut.errors import nearest

T = TypeVar("T")

PrunedStage = Literal["pre", "refit", "post", "refit_post"]
"""Of a pruned model: sliced, refitted, recovered, refitted and then recovered."""
Stage = Literal["none", PrunedStage]
REFITTED: tuple[Stage, ...] = ("refit", "refit_post")
RECOVERED: tuple[Stage, ...] = ("post", "refit_post")
Pass = Literal["forward", "training"]


def _no_repeats(values: tuple[T, ...]) -> tuple[T, ...]:
    if repeated := [value for i, value in enumerate(values) if value in values[:i]]:
        raise ValueError(f"{repeated[0]} stands twice")
    return values


# Names become parts of paths and wildcards of the workflow.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
# What statecut.hub takes: owner/name.
HubName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*$")
]
SliceName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]  # corpus/slice
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
TextFile = Annotated[str, StringConstraints(pattern=r"\.(jsonl|txt)(\.(xz|gz|zst))?$")]
Colour = Annotated[
    str,
    StringConstraints(pattern=r"^#[0-9a-fA-F]{6}$"),
    Field(description="colour of its curves"),
]
Cut = (
    Annotated[float, Field(gt=0, lt=1)]
    | Annotated[str, StringConstraints(pattern=r"^[1-9]\d*x[1-9]\d*$")]
)
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

    @model_validator(mode="before")
    @classmethod
    def _knows_every_key(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"unknown key {key!r}{nearest(str(key), cls.model_fields)}")
        return data
