"""Tables and figures. Their rows, columns and curves decide what is computed."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, PositiveInt, model_validator

from reproduction.config.section import (
    WHICH,
    Cut,
    Many,
    Name,
    Pass,
    PrunedStage,
    Section,
    Seed,
    SliceName,
    Some,
    Stage,
)
from statecut.arguments import Eps, Target

# What a kind of table has no second place for.
SINGLE: dict[str, tuple[str, ...]] = {
    "by_ratio": ("columns", "eps"),
    "by_model": ("ratios", "columns", "eps"),
    "sharing": ("eps",),
    "rotation": ("columns", "eps"),
    "targets": ("ratios", "columns", "eps"),
    "summary": ("ratios", "eps"),
    "breakdown": ("eps",),
    "stages": (),
}


class TableBase(Section):
    caption: str = Field(description="its caption")


class QualityTable(TableBase):
    """A table of evaluated variants. Rows and columns decide what is computed for it."""

    kind: Literal[
        "by_ratio", "by_model", "sharing", "rotation", "targets", "summary", "breakdown", "stages"
    ] = WHICH
    models: Some[Name] = Field(description="models, always with their unpruned baseline")
    methods: Many[Name] = Field((), description="methods")
    ratios: Many[Cut] = Field((), description="of keys to cut, or KEYSxVALUES to keep")
    targets: Some[Target] | None = Field(None, description="of every method; if absent, its own")
    eps: Some[Eps] | None = Field(None, description="kept, matched or both; if absent, the run's")
    columns: dict[Stage, Some[Name]] = Field(
        description="suites or columns of models sliced (pre), refitted (refit), recovered (post), "
        "both (refit_post); under none in a table of baselines alone",
        min_length=1,
    )
    trainings: PositiveInt = Field(1, description="of each model: a number is the mean over them")
    recovery_seeds: Some[Seed] | None = Field(None, description="if absent, those of `recovery`")

    @model_validator(mode="after")
    def _rows_fit_stages(self) -> Self:
        if bool(self.methods) != bool(self.ratios):
            raise ValueError("methods and ratios need each other")
        stages = {*get_args(PrunedStage)} if self.methods else {"none"}
        if not self.columns.keys() <= stages:
            raise ValueError(
                "columns stand under pre, refit, post and refit_post in a table with methods, "
                "under none in others"
            )
        return self

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for part in SINGLE[self.kind]:
            values = getattr(self, part)
            if values is not None and len(values) != 1:
                raise ValueError(
                    f"a table of kind {self.kind} has one of {part}, not {len(values)}"
                )
        if bool(self.methods) == (self.kind == "sharing"):
            raise ValueError("a table of kind sharing has no methods, and every other has some")
        if self.kind == "targets" and not self.targets:
            raise ValueError("a table of kind targets needs targets, of kq, k and q")
        return self


class SpeedTable(TableBase):
    """A table of a benchmark of mixers or models."""

    kind: Literal["mixer_speed", "model_speed"] = WHICH
    benchmark: Name = Field(description="benchmark of the matching kind")
    shows: Pass = Field(description="which of its passes is printed")


class DecodingTable(TableBase):
    """A table of generation."""

    kind: Literal["decoding_speed"] = WHICH
    benchmark: Name = Field(description="benchmark of kind decoding")


Table = Annotated[QualityTable | SpeedTable | DecodingTable, Field(discriminator="kind")]


class Analysis(Section):
    """The sequence whose states are analysed, one pass per variant."""

    data: SliceName = Field(description="its first sequence is taken, as corpus/slice")
    skip: int = Field(128, description="first tokens left out of the spectra", ge=0)


class FigureBase(Section):
    caption: str = Field(description="its caption")


class RankFigure(FigureBase):
    model: Name = Field(description="one of `models`")
    methods: Some[Name] = Field(description="methods; the baseline is drawn too")
    ratio: Cut = Field(description="fraction of the key channels cut, or KEYSxVALUES left")
    stages: Some[PrunedStage] = Field(("pre",), description="as in the columns of tables")
    tokens: PositiveInt = Field(description="tokens of the sequence that are shown")


class SpectrumFigure(RankFigure):
    """Singular values of one head's states, in a model and in its pruned variants."""

    kind: Literal["spectrum"] = WHICH
    layer: int = Field(description="layer of the head, from 0 on", ge=0)
    head: int = Field(description="the value head, from 0 on", ge=0)


class UtilizationFigure(RankFigure):
    """Rank utilization over tokens, in a model and in its pruned variants."""

    kind: Literal["utilization"] = WHICH


class FilterFigure(FigureBase):
    """Convolution filters of a model."""

    kind: Literal["filters"] = WHICH
    model: Name = Field(description="one of `models`")


class SweepFigure(FigureBase):
    """Throughput against head width."""

    kind: Literal["sweep"] = WHICH
    benchmark: Name = Field(description="a mixer benchmark")


class QualityFigure(FigureBase):
    """A number of each method: against the ratio, a panel per model and stage (quality), or against
    the size of a sequence's state, a panel per model with a curve per method and stage (state)."""

    kind: Literal["quality", "state"] = WHICH
    tables: Some[Name] = Field(description="tables of methods at several ratios that hold it")
    column: Name = Field(description="which number, a column of these tables")


Figure = Annotated[
    SpectrumFigure | UtilizationFigure | FilterFigure | SweepFigure | QualityFigure,
    Field(discriminator="kind"),
]
