"""What is wrong with a configuration whose single values are all right.

Each check yields a line for each mistake: the path of the key, its value, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from reproduction.config.evaluation import DecodingBenchmark, MixerBenchmark
from reproduction.config.models import cut_shape
from reproduction.config.pruning import BASELINE
from reproduction.config.run import Config
from reproduction.config.section import RECOVERED, REFITTED, Stage
from reproduction.config.tables import QualityFigure, QualityTable, RankFigure, SpectrumFigure
from reproduction.config.training import Training
from statecut.errors import InputError, nearest
from statecut.pruning.methods import METHODS


def problems(config: Config) -> list[str]:
    """All mistakes, of which later ones can only be found where there are no earlier ones."""
    for checks in (
        (_names,),
        (_identities, _trainings),
        (_cuts,),
        (_data, _stages, _measured, _figures),
    ):
        if lines := [line for check in checks for line in check(config)]:
            return lines
    return []


def _names(config: Config) -> Iterator[str]:
    """Names that refer to nothing."""
    suites, benchmarks = config.evaluation.suites, config.benchmarks
    slices = [f"{name}/{part}" for name, text in config.corpora.items() for part in text.slices]
    tasks = [column for suite in suites.values() for column in suite.tasks]
    columns = [*suites, *(column for suite in suites.values() for column in suite.columns)]
    known: dict[str, Iterable[str]] = {
        "tokenizer": config.tokenizers, "corpus": config.corpora, "recipe": config.recipes,
        "model": config.models, "models": config.models, "methods": config.methods,
        "data": slices, "made_from": slices, "tables": config.tables, "column": tasks,
        **dict.fromkeys(get_args(Stage), columns),
    }  # fmt: skip

    def wrong(path: str, part: Mapping[str, Any]) -> Iterator[str]:
        kind = str(part.get("kind")).replace("sweep", "mixer").removesuffix("_speed")
        timed = [name for name, spec in benchmarks.items() if spec.kind == kind]
        for key, value in part.items():
            names = timed if key == "benchmark" else known.get(key)
            if isinstance(value, dict):
                yield from wrong(f"{path}{key}.", value)
            elif names is not None and isinstance(value, str | list):
                for name in [value] if isinstance(value, str) else value:
                    if name not in names:
                        yield f"{path}{key}: there is no {name!r}{nearest(name, names)}"

    return wrong("", config.model_dump(mode="json"))


def _cuts(config: Config) -> Iterator[str]:
    """Cuts that leave nothing, or more than there is."""
    cuts = {(variant.model, variant.ratio, variant.method) for variant in config.variants()}
    for benchmark in config.benchmarks.values():
        if not isinstance(benchmark, MixerBenchmark):
            cuts |= {(m, ratio, BASELINE) for m in benchmark.models for ratio in benchmark.ratios}
    for name, ratio, method in sorted(cuts, key=str):
        full = cut_shape(model := config.models[name])
        try:
            left = cut_shape(model, ratio)
        except InputError as error:
            yield f"models.{name}: {error}"
            continue
        if isinstance(ratio, str) and not left.narrower_than(full):
            yield f"models.{name}: {ratio}: it has {full.width} x {full.value_width}"
        chooses = method == BASELINE or METHODS[config.methods[method].algorithm].values
        if left.value_width < full.value_width and not chooses:
            yield f"methods.{method}: chooses no value channels, which {ratio} cuts"


def _identities(config: Config) -> Iterator[str]:
    """Two things that are one in file names, in labels or in the columns of the results."""
    taken = {BASELINE: "the unpruned model", **{name: f"models.{name}" for name in config.models}}
    for name in taken.keys() & config.methods.keys():
        yield f"methods.{name}: {taken[name]} has this name already"
    labels = [("Baseline", "the unpruned model")]
    labels += [(method.label, f"methods.{name}") for name, method in config.methods.items()]
    models = [(model.label, f"models.{name}") for name, model in config.models.items()]
    published = [
        ((model.published_as or name, model.filter_sharing, model.training), f"models.{name}")
        for name, model in config.models.items()
    ]
    columns = []
    for name, suite in config.evaluation.suites.items():
        columns += [(column, f"evaluation.suites.{name}") for column in (name, *suite.columns)]
    for pairs in (labels, models, published, columns):
        first: dict[Any, str] = {}
        for value, path in pairs:
            if value in first:
                yield f"{path}: {value!r} is a name or label of {first[value]} already"
            first.setdefault(value, path)


def _trainings(config: Config) -> Iterator[str]:
    """More of them than there are."""
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            for model in table.models:
                if table.trainings > (most := getattr(config.models[model].source, "trainings", 1)):
                    yield f"tables.{name}.trainings: {table.trainings}: {model} has {most}"


def _data(config: Config) -> Iterator[str]:
    """More text than a slice has, tokens that do not fit, and seeds that the run has not."""
    trainings: dict[str, Training] = {f"recipes.{n}": r for n, r in config.recipes.items()}
    seeds = {f"evaluation.suites.{n}.seeds": s.seeds for n, s in config.evaluation.suites.items()}
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            seeds[f"tables.{name}.recovery_seeds"] = table.recovery_seeds
    if config.recovery:
        trainings["recovery"], seeds["recovery.seeds"] = config.recovery, config.recovery.seeds
    for path, some in seeds.items():
        if other := {*(some or ())} - {*config.seeds}:
            yield f"{path}: {min(other)} is none of `seeds` {list(config.seeds)}"
    for path, training in trainings.items():
        available = len(config.slice(training.data)) * training.epochs
        if training.sequences > available:
            yield (
                f"{path}: {training.steps} steps need {training.sequences} sequences, but "
                f"{training.data} has {available} in {training.epochs} epochs"
            )
    for name, suite in config.evaluation.suites.items() if config.evaluation.made_from else ():
        for column, task in suite.tasks.items():
            made = task.task.startswith("demo_") and task.file is not None
            if made and not f"{task.file}".startswith(f"results/{config.run}/"):
                yield (
                    f"evaluation.suites.{name}.tasks.{column}.file: {task.file}: the run makes it "
                    f"and would replace yours; it must lie in results/{config.run}/"
                )
    if text := config.calibration:
        available, path = len(config.slice(text.data)), "calibration.sequences"
        if text.sequences > available:
            yield f"{path}: {text.sequences}: {text.data} has {available}"
        if len(config.seeds) > 1 and text.sequences == available:
            yield (
                f"{path}: all {available} of {text.data}, so that every seed calibrates on the "
                "same text: make the slice larger"
            )
        tokens = text.sequences * config.corpora[text.data.split("/")[0]].length
        if text.rows > tokens:
            yield f"calibration.rows: {text.rows}: its sequences have {tokens} tokens"
    for name, model in config.models.items():
        tokenizer, size = config.tokenizers[model.tokenizer], model.vocab_size
        if tokenizer.kind == "train" and tokenizer.vocab_size > size:
            yield f"models.{name}.vocab_size: {size}: its tokenizer has {tokenizer.vocab_size}"


def _stages(config: Config) -> Iterator[str]:
    """Sections that others need and that are missing, and what cannot be trained or chosen."""
    flame = {name for name, recipe in config.recipes.items() if recipe.trainer == "flame"}
    for name in flame if config.device == "cpu" else ():
        yield f"recipes.{name}.trainer: flame needs GPUs, and `device` is cpu: take builtin"
    for name, model in config.models.items():
        recipe = model.source.recipe if model.source.kind == "pretrain" else None
        if recipe in flame and model.adapter.library == "transformers":
            yield (
                f"models.{name}.source.recipe: {recipe}: flame trains no models of transformers: "
                "take a recipe whose trainer is builtin"
            )
    for name, method in config.methods.items():
        if method.calibrated and not config.calibration:
            yield f"methods.{name}: {method.algorithm} needs a `calibration`"
    shown: dict[str, Iterable[Stage]] = {}
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            shown[f"tables.{name}"] = table.columns
            for key in table.methods:
                known = METHODS[config.methods[key].algorithm].targets
                if other := {*(table.targets or ())} - {*known}:
                    yield f"tables.{name}.targets: {min(other)}: {key} judges by {known}"
    for name, figure in config.figures.items():
        if isinstance(figure, RankFigure):
            shown[f"figures.{name}"] = figure.stages
    for path, stages in shown.items():
        if {*RECOVERED} & {*stages} and not config.recovery:
            yield f"{path}: shows recovered models, so it needs a `recovery`"
        if {*REFITTED} & {*stages} and not config.calibration:
            yield f"{path}: shows refitted models, so it needs a `calibration`"


def _measured(config: Config) -> Iterator[str]:
    """Timings that cannot be made, or that the results could not tell apart."""
    for name, benchmark in config.benchmarks.items():
        if isinstance(benchmark, DecodingBenchmark):
            for model in benchmark.models:
                if config.models[model].adapter.library == "transformers":
                    yield (
                        f"benchmarks.{name}.models: {model}: decoding is timed of models whose "
                        "only cache is flash-linear-attention's recurrent state"
                    )
    first: dict[Any, str] = {}
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            continue
        if not (cells := config.timings(name)):
            yield f"tables.{name}.shows: its benchmark does not time that pass"
        for cell in cells:
            known = first.setdefault((cell.subject, cell.width, cell.mode), cell.benchmark)
            if known != cell.benchmark:
                yield (
                    f"benchmarks.{cell.benchmark}: times {cell.mode} of {cell.subject} at d_k "
                    f"{cell.width}, as benchmarks.{known} does, and tables show both"
                )


def _figures(config: Config) -> Iterator[str]:
    """Curves that cannot be drawn, and numbers beyond what a model or a sequence has."""
    for name, figure in config.figures.items():
        path = f"figures.{name}"
        if isinstance(figure, QualityFigure):
            for shown in figure.tables:
                table = config.tables[shown]
                drawn = isinstance(table, QualityTable) and table.methods
                if not drawn or table.targets or table.eps:  # type: ignore[union-attr]
                    yield f"{path}.tables: {shown}: must have methods, and no targets or eps"
                elif figure.column not in config.columns(shown, "none"):
                    yield f"{path}.tables: {shown} has no column {figure.column}"
        if isinstance(figure, RankFigure) and not config.analysis:
            yield f"{path}: shows states, so it needs an `analysis`"
        elif isinstance(figure, RankFigure) and config.analysis:
            length = config.corpora[config.analysis.data.split("/")[0]].length
            if not (skip := config.analysis.skip) < figure.tokens <= length:
                limits = f"above analysis.skip ({skip}), up to the corpus's length ({length})"
                yield f"{path}.tokens: {figure.tokens}: must lie {limits}"
        if isinstance(figure, SpectrumFigure):
            model = config.models[figure.model]
            if figure.layer not in (layers := model.mixer_shape.layers):
                yield f"{path}.layer: {figure.layer}: those with a delta rule are {list(layers)}"
            if figure.head >= (heads := model.value_heads):
                yield f"{path}.head: {figure.head}: there are {heads} from 0 on"
