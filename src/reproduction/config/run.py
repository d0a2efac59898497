"""One run: all its sections together, and what has to be computed for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Literal, TypeVar

from pydantic import Field, Strict, field_validator

from reproduction.config.evaluation import (
    Benchmark,
    Evaluation,
    MixerBenchmark,
    ModelBenchmark,
    Preflight,
    Suite,
)
from reproduction.config.models import Model, cut_shape, shape_of, trained_again, training_name
from reproduction.config.pruning import BASELINE, CalibrationText, PruningMethod
from reproduction.config.section import (
    RECOVERED,
    REFITTED,
    Cut,
    Many,
    Name,
    Section,
    Seed,
    Some,
    Stage,
)
from reproduction.config.sources import Corpus, Tokenizer
from reproduction.config.tables import (
    Analysis,
    DecodingTable,
    Figure,
    QualityTable,
    RankFigure,
    Table,
)
from reproduction.config.training import Recipe, Recovery
from statecut.arguments import Eps, Target
from statecut.models.shapes import Kernel, Shape

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Variant:
    """One model to be evaluated: a model, what was cut from it, and what was done then.

    `ratio` is what was cut, a fraction of the keys or widths of keys and values (`Cut`). The
    baseline has method `baseline`, target "", ratio 0 and stage none, or post for the
    recovered control. `seed` is 0 where nothing is drawn. Recovery draws too, so recovered variants
    have the run's seeds whatever the method; the control has one. Where nothing was cut, and in
    results that do not say it, `eps` is kept.
    """

    model: str
    method: str
    target: str
    ratio: Cut
    seed: int
    rft: Stage
    eps: Eps = "kept"

    @property
    def pruned(self) -> bool:
        return self.method != BASELINE

    @property
    def refitted(self) -> bool:
        return self.rft in REFITTED

    @property
    def recovered(self) -> bool:
        return self.rft in RECOVERED


@dataclass(frozen=True, order=True)
class Measurement:
    """One cell of a benchmark, measured in a process of its own."""

    benchmark: str
    subject: str  # a mixer or a model
    kernel: Kernel
    ratio: Cut  # 0 for mixers: their widths are given
    width: int  # d_k
    mode: str  # forward, training or decoding

    @property
    def trains(self) -> bool:
        return self.mode == "training"


class Config(Section):
    """One run."""

    run: Name = Field(description="name of the run; its results are under results/RUN/")
    about: str = Field("", description="what the run is and cannot say; begins its report")
    partial: str | None = Field(None, description="why results are missing; then none is computed")
    rehearsal: Annotated[bool, Strict(False)] = Field(  # from the command line it is a text
        False,
        description="all jobs with hardly any work and made-up data where the run's are not here; "
        "results are under results/rehearsal/",
    )
    device: Literal["cuda", "cpu"] = Field(
        "cuda", description="cuda: a job that can use no GPU fails; cpu, for toy sizes, uses none"
    )
    seeds: Some[Seed] = Field(description="of random channels, calibration text, sampled rows")
    eps: Eps = Field(
        "matched",
        description="eps of the output norms after a cut: matched, multiplied so that the model "
        "computes what the whole one does with them set to zero; or kept, as in the paper",
    )
    tokenizers: dict[Name, Tokenizer] = Field(description="tokenizers by name")
    corpora: dict[Name, Corpus] = Field(description="text by name")
    recipes: dict[Name, Recipe] = Field({}, description="pretraining recipes by name")
    models: dict[Name, Model] = Field(description="models by name", min_length=1)
    calibration: CalibrationText | None = Field(None, description="for text and refit")
    methods: dict[Name, PruningMethod] = Field({}, description="pruning methods by name")
    recovery: Recovery | None = Field(None, description="needed by what shows recovered models")
    evaluation: Evaluation = Field(description="how models are evaluated")
    benchmarks: dict[Name, Benchmark] = Field({}, description="benchmarks by name")
    preflight: Preflight = Field(description="the check of kernels and widths")
    analysis: Analysis | None = Field(None, description="needed by figures of states")
    figures: dict[Name, Figure] = Field({}, description="figures by name")
    tables: dict[Name, Table] = Field({}, description="tables by name")

    @field_validator("models")
    @classmethod
    def _train_again(cls, models: dict[str, Model]) -> dict[str, Model]:
        again = (pair for name, model in models.items() for pair in trained_again(name, model))
        return {**models, **dict(again)}

    def slice(self, name: str) -> range:
        """The sequences of a `corpus/slice`, as positions in the packed corpus."""
        corpus, wanted = name.split("/")
        slices = self.corpora[corpus].slices
        start = sum([*slices.values()][: [*slices].index(wanted)])
        return range(start, start + slices[wanted])

    def suite_of(self, column: str) -> Suite:
        """The suite that a column of the results belongs to."""
        return self.evaluation.suites[self.suite_name(column)]

    def suite_name(self, column: str) -> str:
        (name,) = (n for n, s in self.evaluation.suites.items() if column in s.columns)
        return name

    def columns(self, table: str, stage: Stage) -> tuple[str, ...]:
        """The columns that a table shows of a stage; of a baseline (none), those of all stages."""
        columns, suites = self._table(table).columns, self.evaluation.suites
        return _unique(
            column
            for key in (columns if stage == "none" else [stage])
            for name in columns.get(key, ())
            for column in (suites[name].columns if name in suites else (name,))
        )

    def eps_of(self, table: str) -> tuple[Eps, ...]:
        """What a table shows of cuts with eps kept and matched: the run's own, or what it names."""
        return self._table(table).eps or (self.eps,)

    def cells(self, table: str) -> tuple[tuple[Variant, str], ...]:
        """Every cell of a table of variants: which variant, and which column of its results."""
        spec, recovery = self._table(table), self.recovery
        seeds = spec.recovery_seeds or (recovery and recovery.seeds) or self.seeds
        variants = (
            variant
            for model, training in product(spec.models, range(spec.trainings))
            for variant in self._variants(
                training_name(model, training), spec.methods, spec.ratios, spec.targets,
                [*spec.columns], self.eps_of(table), seeds,
            )
        )  # fmt: skip
        return tuple(
            (variant, column)
            for variant in variants
            for column in self.columns(table, variant.rft)
            if self._evaluates(self.suite_of(column), variant)
        )

    def evaluations(self, *tables: str) -> tuple[tuple[Variant, str], ...]:
        """Which variant is evaluated on which suite, for these tables or for all."""
        return _unique(
            (variant, self.suite_name(column))
            for table in tables or self.tables
            if isinstance(self.tables[table], QualityTable)
            for variant, column in self.cells(table)
            if not self.suite_of(column).left_out(column)
        )

    def analyses(self, *figures: str) -> tuple[Variant, ...]:
        """Variants whose states are analysed, for these figures or for all."""
        seeds = (self.recovery and self.recovery.seeds) or self.seeds
        return _unique(
            variant
            for name in figures or self.figures
            if isinstance(figure := self.figures[name], RankFigure)
            for variant in self._variants(
                figure.model, figure.methods, [figure.ratio], None, figure.stages, [self.eps], seeds
            )
            if variant.pruned or variant.rft == "none"
        )

    def variants(self) -> tuple[Variant, ...]:
        """Every variant that tables and figures need."""
        return _unique([*(variant for variant, _ in self.evaluations()), *self.analyses()])

    def measurements(self, *benchmarks: str) -> tuple[Measurement, ...]:
        """Every cell of these benchmarks, or of all."""
        names = benchmarks or self.benchmarks
        return tuple(cell for name in names for cell in self._measurements(name))

    def timings(self, table: str) -> tuple[Measurement, ...]:
        """The cells of a benchmark that a table shows, which are those of one pass."""
        spec = self.tables[table]
        assert not isinstance(spec, QualityTable)
        mode = "decoding" if isinstance(spec, DecodingTable) else spec.shows
        return tuple(cell for cell in self.measurements(spec.benchmark) if cell.mode == mode)

    def trained_shapes(self) -> tuple[Shape, ...]:
        """Delta rules that pretraining and recovery will train, for the preflight."""
        models = self.models
        shapes = {shape_of(model) for model in models.values() if model.source.kind == "pretrain"}
        shapes |= {shape_of(models[v.model], v.ratio) for v in self.variants() if v.recovered}
        return tuple(sorted(shapes))

    def _table(self, name: str) -> QualityTable:
        table = self.tables[name]
        assert isinstance(table, QualityTable)
        return table

    def _variants(
        self,
        model: str,
        methods: Iterable[str],
        ratios: Iterable[Cut],
        targets: Iterable[Target] | None,
        stages: Collection[Stage],
        eps: Iterable[Eps],
        recovered: Iterable[Seed],
    ) -> Iterator[Variant]:
        """A model, its control, and all that is cut from it; `recovered` are the recovery seeds."""
        baseline = Variant(model, BASELINE, "", 0.0, 0, "none")
        yield baseline
        if "post" in stages and self.recovery and self.recovery.control:
            yield replace(baseline, rft="post")
        for name in methods:
            method = self.methods[name]
            cuts = product(stages, eps, targets or (method.target,), ratios)
            for stage, kept, target, ratio in cuts:
                seeds = recovered if stage in RECOVERED else self.seeds if method.drawn else (0,)
                for seed in seeds:
                    yield Variant(model, name, target, ratio, seed, stage, kept)

    def _evaluates(self, suite: Suite, variant: Variant) -> bool:
        """Whether a suite is evaluated with the seed of a variant, if that draws anything."""
        draws = variant.pruned and (variant.recovered or self.methods[variant.method].drawn)
        return suite.seeds is None or variant.seed in suite.seeds or not draws

    def student(self, variant: Variant) -> Variant:
        """What a variant's recovery starts from."""
        if not variant.pruned:
            return replace(variant, rft="none")
        seed = variant.seed if self.methods[variant.method].drawn else 0
        return replace(variant, seed=seed, rft="refit" if variant.refitted else "pre")

    def recovery_of(self, variant: Variant) -> Recovery:
        """The settings of a variant's recovery: each of the run's seeds has a draw of its own."""
        assert self.recovery
        draw = self.seeds.index(variant.seed) if variant.pruned else 0
        return self.recovery.model_copy(update={"seed": self.recovery.seed + draw})

    def recipe_of(self, model: str) -> Recipe:
        """The settings of a model's pretraining: each training has a seed of its own."""
        source = self.models[model].source
        assert source.kind == "pretrain"
        recipe = self.recipes[source.recipe]
        return recipe.model_copy(update={"seed": recipe.seed + source.training})

    def _measurements(self, name: str) -> Iterator[Measurement]:
        benchmark = self.benchmarks[name]
        if isinstance(benchmark, MixerBenchmark):
            cells = product(benchmark.mixers.items(), benchmark.widths, benchmark.passes)
            for (subject, mixer), d_k, mode in cells:
                yield Measurement(name, subject, mixer.architecture, 0.0, d_k, mode)
            return
        modes: tuple[str, ...] = ("decoding",)
        if isinstance(benchmark, ModelBenchmark):
            modes = benchmark.passes
        for subject, ratio, timed in product(benchmark.models, (0.0, *benchmark.ratios), modes):
            model = self.models[subject]
            d_k = cut_shape(model, ratio).width
            yield Measurement(name, subject, model.kernel, ratio, d_k, timed)


class JobConfig(Config):
    """The sections that one job uses, as its rule names them, and nothing else."""

    run: Name = ""
    seeds: Many[Seed] = ()
    tokenizers: dict[Name, Tokenizer] = Field({})
    corpora: dict[Name, Corpus] = Field({})
    models: dict[Name, Model] = Field({})
    evaluation: Evaluation = Field(
        default_factory=lambda: Evaluation(protocol="none", made_from=None, suites={})
    )
    preflight: Preflight | None = None  # type: ignore[assignment]


def _unique(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
