"""What is wrong with a configuration whose single values are all right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args

from reproduction.config.benchmarks import DecodingBenchmark, MixerBenchmark
from reproduction.config.figures import QualityFigure, RankFigure, SpectrumFigure
from reproduction.config.models import cut_shape
from reproduction.config.needs import hub_items
from reproduction.config.pruning import BASELINE
from reproduction.config.run import Config, Measurement
from reproduction.config.section import RECOVERED, REFITTED, Cut, NameOf, Section, Stage
from reproduction.config.tables import QualityTable, SpeedTable
from reproduction.config.training import Training
from statecut.errors import InputError, nearest
from statecut.pruning.methods import METHODS


def problems(config: Config) -> list[str]:
    """A line for each problem, by its path; sizes only once every name refers to something."""
    return list(_unknown_names(config)) or list(_inconsistent(config))


def _unknown_names(config: Config) -> Iterator[str]:
    """Names that refer to nothing."""
    suites = config.evaluation.suites
    tasks = [column for suite in suites.values() for column in suite.tasks]
    known: dict[str, Iterable[str]] = {
        section: getattr(config, section)
        for section in ("tokenizers", "corpora", "recipes", "models", "methods", "tables")
    }
    known["slices of corpora"] = {
        f"{name}/{part}" for name, corpus in config.corpora.items() for part in corpus.slices
    }
    known["columns of tasks"] = tasks
    known["suites and columns"] = {
        *suites, *(column for suite in suites.values() for column in suite.columns)
    }  # fmt: skip
    for kind in ("mixer", "model", "decoding"):
        benchmarks = config.benchmarks.items()
        known[f"benchmarks of kind {kind}"] = [n for n, spec in benchmarks if spec.kind == kind]
    for path, name, what in _names("", config):
        if name not in known[what]:
            yield f"{path}: {name!r} is none of `{what}`{nearest(name, known[what])}"


def _names(path: str, value: Any, what: str = "") -> Iterator[tuple[str, str, str]]:
    """Every name in a part of the configuration, with its path and what it must be one of."""
    match value:
        case Section():
            kind = getattr(value, "kind", "").removesuffix("_speed")
            for name, field in type(value).model_fields.items():
                marker = _name_of((field.annotation, *field.metadata))
                inner = marker.what.format(kind=kind) if marker else ""
                yield from _names(f"{path}.{name}", getattr(value, name), inner)
        case Mapping():
            for key, inner in value.items():
                yield from _names(f"{path}.{key}", inner, what)
        case tuple() if what:
            for name in value:
                yield path.removeprefix("."), name, what
        case str() if what:
            yield path.removeprefix("."), value, what


def _name_of(types: tuple[Any, ...]) -> NameOf | None:
    """What Annotated says anywhere in these types."""
    for part in types:
        if marker := part if isinstance(part, NameOf) else _name_of(get_args(part)):
            return marker
    return None


def _inconsistent(config: Config) -> Iterator[str]:
    """What cannot go together, in a configuration whose names all refer to something."""
    yield from _bad_labels(config)
    yield from _bad_names(config)
    yield from _bad_ratios(config)
    yield from _bad_timings(config)
    yield from _bad_data(config)
    yield from _bad_seeds(config)
    yield from _bad_columns(config)
    yield from _bad_curves(config)
    yield from _bad_needs(config)
    yield from _bad_sizes(config)
    yield from _bad_revisions(config)


def _bad_labels(config: Config) -> Iterator[str]:
    """Two things that a reader of a table could not tell apart."""
    suites = config.evaluation.suites
    labelled: dict[str, Mapping[str, Any]] = {"models": config.models, "methods": config.methods}
    labelled |= {"evaluation.suites": suites}
    labelled |= {f"evaluation.suites.{name}.tasks": suite.tasks for name, suite in suites.items()}
    for name, benchmark in config.benchmarks.items():
        if isinstance(benchmark, MixerBenchmark):
            labelled[f"benchmarks.{name}.mixers"] = benchmark.mixers
    for path, things in labelled.items():
        seen = {"Baseline": "the unpruned model"} if path == "methods" else {}
        for name, thing in things.items():
            first = seen.setdefault(thing.label, f"{path}.{name}")
            if first != f"{path}.{name}":
                yield f"{path}.{name}.label: {thing.label!r} is the label of {first} already"


def _bad_names(config: Config) -> Iterator[str]:
    """Two things that are one in file names, labels or the columns of the results."""
    for name in sorted({BASELINE, *config.models} & config.methods.keys()):
        whose = "the unpruned model" if name == BASELINE else "a model"
        yield f"methods.{name}: {whose} has this name already"
    for benchmark_name, benchmark in config.benchmarks.items():
        if isinstance(benchmark, MixerBenchmark):
            for name in sorted(config.models.keys() & benchmark.mixers.keys()):
                yield f"benchmarks.{benchmark_name}.mixers.{name}: a model has this name already"
    published: dict[tuple[str, str], str] = {}
    for name, model in config.models.items():
        if model.published_as == name:
            yield f"models.{name}.published_as: {name!r} is its own name; leave it out"
        identity = model.published_as or name, model.filter_sharing
        first = published.setdefault(identity, name)
        if first != name:
            yield (
                f"models.{name}: in the results it would be {identity[0]!r} with filters "
                f"{identity[1]!r}, as models.{first} is: give one another `published_as`"
            )


def _bad_ratios(config: Config) -> Iterator[str]:
    """Two ratios that are the same cut, or look the same."""
    places: dict[str, tuple[Iterable[str], Iterable[Cut]]] = {}
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            places[f"tables.{name}"] = table.models, table.ratios
    for name, benchmark in config.benchmarks.items():
        if not isinstance(benchmark, MixerBenchmark):
            places[f"benchmarks.{name}"] = benchmark.models, benchmark.ratios
    for path, (models, ratios) in places.items():
        seen: dict[str, Cut] = {}
        for ratio in ratios:
            effects = [] if isinstance(ratio, str) else [f"are printed as {100 * ratio:g}%"]
            for model in models:
                with suppress(InputError):  # a ratio that leaves nothing: in `_bad_sizes`
                    left = cut_shape(config.models[model], ratio)
                    effects.append(f"leave {left.width} x {left.value_width} channels of {model}")
            for effect in effects:
                if seen.setdefault(effect, ratio) != ratio:
                    yield f"{path}.ratios: {seen[effect]} and {ratio} both {effect}"


def _bad_timings(config: Config) -> Iterator[str]:
    """Two benchmarks in tables that time the same: the results have no column that tells which."""
    seen: dict[tuple[str, int, str], str] = {}
    clashes: dict[tuple[str, str], Measurement] = {}
    with suppress(InputError):  # a ratio that leaves nothing: in `_bad_sizes`
        for name, table in config.tables.items():
            for cell in () if isinstance(table, QualityTable) else config.timings(name):
                first = seen.setdefault((cell.subject, cell.width, cell.mode), cell.benchmark)
                if first != cell.benchmark:
                    clashes.setdefault((first, cell.benchmark), cell)
    for (first, second), cell in clashes.items():
        yield (
            f"benchmarks.{second}: times {cell.mode} of {cell.subject} at d_k {cell.width}, as "
            f"benchmarks.{first} does, and tables show both"
        )


def _bad_data(config: Config) -> Iterator[str]:
    """More text than a slice has, and tokens that do not fit."""
    trainings: dict[str, Training] = {f"recipes.{n}": r for n, r in config.recipes.items()}
    if config.recovery:
        trainings["recovery"] = config.recovery
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
    if calibration := config.calibration:
        available = len(config.slice(calibration.data))
        if calibration.sequences > available:
            slice_has = f"{calibration.data} has {available}"
            yield f"calibration.sequences: {calibration.sequences}: {slice_has}"
        if len(config.seeds) > 1 and calibration.sequences == available:
            yield (
                f"calibration.sequences: all {available} of {calibration.data}, so that every seed "
                "calibrates on the same text: make the slice larger"
            )
        tokens = calibration.sequences * config.corpora[calibration.data.split("/")[0]].length
        if calibration.rows > tokens:
            yield f"calibration.rows: {calibration.rows}: its sequences have {tokens} tokens"
    for name, model in config.models.items():
        tokenizer = config.tokenizers[model.tokenizer]
        if tokenizer.kind == "train" and tokenizer.vocab_size > model.vocab_size:
            yield (
                f"models.{name}.vocab_size: {model.vocab_size}, but its tokenizer "
                f"{model.tokenizer} has {tokenizer.vocab_size} tokens"
            )


def _bad_seeds(config: Config) -> Iterator[str]:
    """Parts of the run's seeds that are none."""
    parts = {"recovery.seeds": config.recovery.seeds if config.recovery else None}
    for name, suite in config.evaluation.suites.items():
        parts[f"evaluation.suites.{name}.seeds"] = suite.seeds
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            parts[f"tables.{name}.recovery_seeds"] = table.recovery_seeds
    for path, seeds in parts.items():
        for seed in sorted(set(seeds or ()) - set(config.seeds)):
            yield f"{path}: {seed} is none of `seeds` {list(config.seeds)}"


def _bad_columns(config: Config) -> Iterator[str]:
    """A column's name must tell its suite, and a name must tell a table from a figure."""
    seen: dict[str, str] = dict.fromkeys(config.evaluation.suites, "the name of a suite")
    for name, suite in config.evaluation.suites.items():
        for column in suite.columns:
            if column in seen:
                yield f"evaluation.suites.{name}: column {column!r} is {seen[column]} already"
            seen[column] = f"a column of suite {name}"
    for name in sorted(config.tables.keys() & config.figures.keys()):
        yield f"figures.{name}: a table has this name already"


def _bad_curves(config: Config) -> Iterator[str]:
    """A figure of quality is drawn of measured columns of tables with methods."""
    for name, figure in config.figures.items():
        if not isinstance(figure, QualityFigure):
            continue
        path = f"figures.{name}"
        for table in figure.tables:
            shown = config.tables[table]
            if not isinstance(shown, QualityTable) or not shown.methods:
                yield f"{path}.tables: {table} has no methods, so there is no curve to draw"
            elif shown.targets:
                yield f"{path}.tables: {table} has targets, and a curve is of one"
            elif shown.eps:
                yield f"{path}.tables: {table} has an eps, and a curve is of the run's"
            elif not any(figure.column in config.columns(table, stage) for stage in shown.columns):
                yield f"{path}.tables: {table} has no column {figure.column}"


def _bad_needs(config: Config) -> Iterator[str]:
    """Sections that others need, and that are missing."""
    for name, recipe in config.recipes.items():
        if config.device == "cpu" and recipe.trainer == "flame":
            yield f"recipes.{name}.trainer: flame needs GPUs, and `device` is cpu: take builtin"
    of_transformers = {n for n, m in config.models.items() if m.adapter.library == "transformers"}
    for name in sorted(of_transformers):
        source = config.models[name].source
        if source.kind == "pretrain" and config.recipes[source.recipe].trainer == "flame":
            yield (
                f"models.{name}.source.recipe: {source.recipe} trains with flame, which knows the "
                "models of flash-linear-attention alone: take one whose trainer is builtin"
            )
    for name, benchmark in config.benchmarks.items():
        if isinstance(benchmark, DecodingBenchmark):
            for model in sorted(of_transformers.intersection(benchmark.models)):
                yield (
                    f"benchmarks.{name}.models: {model}: decoding is timed of models whose only "
                    "cache is flash-linear-attention's recurrent state"
                )
    for name, method in config.methods.items():
        if method.calibrated and not config.calibration:
            yield f"methods.{name}: {method.algorithm} needs a `calibration`"
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            for key in table.methods:
                known = METHODS[config.methods[key].algorithm].targets
                for target in sorted({*(table.targets or ())} - {*known}):
                    known_targets = " or ".join(known)
                    yield f"tables.{name}.targets: {target}: {key} judges by {known_targets}"
            yield from _unmet_stages(config, f"tables.{name}", table.columns)
        elif isinstance(table, SpeedTable):
            passes = config.benchmarks[table.benchmark].passes  # type: ignore[union-attr]
            if table.shows not in passes:
                yield f"tables.{name}.shows: {table.shows!r}: only {passes[0]} is measured"
    for name, figure in config.figures.items():
        if isinstance(figure, RankFigure):
            yield from _unmet_stages(config, f"figures.{name}", figure.stages)
            if not config.analysis:
                yield f"figures.{name}: shows states, so it needs an `analysis`"


def _unmet_stages(config: Config, path: str, stages: Iterable[Stage]) -> Iterator[str]:
    if {*RECOVERED} & {*stages} and not config.recovery:
        yield f"{path}: shows recovered models, so it needs a `recovery`"
    if {*REFITTED} & {*stages} and not config.calibration:
        yield f"{path}: shows refitted models, so it needs a `calibration`"


def _bad_sizes(config: Config) -> Iterator[str]:
    """Numbers beyond what a model or a sequence has."""
    for name, figure in config.figures.items():
        if isinstance(figure, RankFigure) and config.analysis:
            length = config.corpora[config.analysis.data.split("/")[0]].length
            if not config.analysis.skip < figure.tokens <= length:
                yield (
                    f"figures.{name}.tokens: {figure.tokens}: must lie above analysis.skip "
                    f"{config.analysis.skip} and within the {length} tokens of a sequence"
                )
        if isinstance(figure, SpectrumFigure):
            path, model = f"figures.{name}", config.models[figure.model]
            if figure.layer >= model.num_hidden_layers:
                yield f"{path}.layer: {figure.layer}: there are {model.num_hidden_layers} from 0 on"
            elif figure.layer not in (layers := model.mixer_shape.layers):
                yield f"{path}.layer: {figure.layer}: those with a delta rule are {list(layers)}"
            if figure.head >= model.num_heads:
                yield f"{path}.head: {figure.head}: there are {model.num_heads} from 0 on"
    cuts = {(variant.model, variant.ratio) for variant in config.variants()}
    for benchmark in config.benchmarks.values():
        if not isinstance(benchmark, MixerBenchmark):
            cuts |= {(model, ratio) for model in benchmark.models for ratio in benchmark.ratios}
    for model_name, ratio in sorted(cuts, key=str):
        try:
            left, full = (cut_shape(config.models[model_name], cut) for cut in (ratio, 0.0))
        except InputError as error:
            yield f"models.{model_name}: {error}"
            continue
        if isinstance(ratio, str) and not left.narrower_than(full):
            yield f"models.{model_name}: {ratio}: it has {full.width} x {full.value_width}"
    for model_name, method, ratio in {(v.model, v.method, v.ratio) for v in config.variants()}:
        if method != BASELINE and not METHODS[config.methods[method].algorithm].values:
            model = config.models[model_name]
            if isinstance(ratio, str) and cut_shape(model, ratio).value_width < model.head_v_dim:
                yield f"methods.{method}: chooses no value channels, which {ratio} cuts"


def _bad_revisions(config: Config) -> Iterator[str]:
    """One repository at two revisions: it is downloaded once."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for path, item in hub_items(config):
        first, revision = seen.setdefault((item.kind, item.name), (path, item.revision))
        if item.revision != revision:
            yield (
                f"{path}.revision: {item.revision!r}, but {first} takes {item.name} at "
                f"{revision!r}; one run can use only one of them"
            )
