"""Figures, and the states that some of them show."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from reproduction.config.section import (
    WHICH,
    Cut,
    MethodName,
    ModelName,
    Name,
    NameOf,
    PrunedStage,
    Section,
    SliceName,
    Some,
)


class Analysis(Section):
    """The sequence whose states are analysed, one pass per variant."""

    data: SliceName = Field(description="its first sequence is taken, as corpus/slice")
    skip: int = Field(128, description="first tokens left out of the spectra", ge=0)


class FigureBase(Section):
    caption: str = Field(description="its caption")


class RankFigure(FigureBase):
    model: ModelName = Field(description="one of `models`")
    methods: Some[MethodName] = Field(description="methods; the baseline is drawn too")
    ratio: Cut = Field(description="fraction of the key channels cut, or KEYSxVALUES left")
    stages: Some[PrunedStage] = Field(
        ("pre",),
        description="before (pre) and after (post) recovery, refitted (refit), or refitted "
        "and recovered (refit_post)",
    )
    tokens: PositiveInt = Field(description="tokens of the sequence that are shown")


class SpectrumFigure(RankFigure):
    """Singular values of one head's states, in a model and in its pruned variants."""

    kind: Literal["spectrum"] = WHICH
    layer: int = Field(description="layer of the head, from 0 on", ge=0)
    head: int = Field(description="the head, from 0 on", ge=0)


class UtilizationFigure(RankFigure):
    """Rank utilization over tokens, in a model and in its pruned variants."""

    kind: Literal["utilization"] = WHICH


class FilterFigure(FigureBase):
    """Convolution filters of a model."""

    kind: Literal["filters"] = WHICH
    model: ModelName = Field(description="one of `models`")


class SweepFigure(FigureBase):
    """Throughput against head width."""

    kind: Literal["sweep"] = WHICH
    benchmark: Annotated[Name, NameOf("benchmarks of kind mixer")] = Field(
        description="a mixer benchmark"
    )


class QualityFigure(FigureBase):
    """A number of each method: against the ratio, a panel per model and stage (quality), or against
    the size of a sequence's state, a panel per model with a curve per method and stage (state)."""

    kind: Literal["quality", "state"] = WHICH
    tables: Some[Annotated[Name, NameOf("tables")]] = Field(
        description="tables of methods at several ratios that hold it"
    )
    column: Annotated[Name, NameOf("columns of tasks")] = Field(
        description="which number, a column of these tables"
    )


Figure = Annotated[
    SpectrumFigure | UtilizationFigure | FilterFigure | SweepFigure | QualityFigure,
    Field(discriminator="kind"),
]
