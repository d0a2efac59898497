"""What the rules of the workflow read, by their wildcards: files, and settings.

So rule files need no functions, and what a rule depends on can be tested without one. `settings` is
the part of the configuration that a script gets, and a change of it makes the result again: it
holds what the result depends on, and no more. Labels and captions count only where they are
printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from reproduction.config import (
    Config,
    Cut,
    Figure,
    Measurement,
    MixerBenchmark,
    QualityFigure,
    QualityTable,
    RankFigure,
    SpectrumFigure,
    cut_shape,
    shape_of,
)
from reproduction.config.evaluation import DATA_SETS
from reproduction.config.needs import needs
from reproduction.config.section import RECOVERED
from reproduction.config.sources import matching, tokenizer_files
from reproduction.import_model import model_files
from reproduction.running.paths import Paths
from statecut.hub import Kind, read_lock
from statecut.models.architectures import MODULES, RULES
from statecut.pruning.methods import METHODS

Section = dict[str, Any]

# Stands in for weights and tokenizer where only a model's shape matters.
NO_WEIGHTS = {"source": {"kind": "local", "path": ""}, "tokenizer": "none"}


class Inputs:
    """The inputs of every rule, for one run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.paths = Paths(config)
        self.variants = config.variants()
        self.subjects = {self.paths.subject(v): v for v in self.variants}
        self.recoveries = {name: v for name, v in self.subjects.items() if v.recovered}
        self.shapes = {shape.name: shape for shape in config.trained_shapes()}
        self.cells = {self.paths.measurement(cell): cell for cell in config.measurements()}
        kinds = {name: model.source.kind for name, model in config.models.items()}
        self.trained = [name for name, kind in kinds.items() if kind == "pretrain"]
        self.imported = [name for name, kind in kinds.items() if kind != "pretrain"]

    def constraints(self) -> dict[str, str]:
        """A pattern for each wildcard: what the configuration does not name is no target."""
        names: dict[str, Iterable[object]] = {
            "tokenizer": self.config.tokenizers,
            "corpus": self.config.corpora,
            "model": self.config.models,
            "method": self.config.methods,
            "ratio": {variant.ratio for variant in self.variants},
            "cut": {Path(subject).name for subject in self.recoveries},
            "subject": self.subjects,
            "suite": self.config.evaluation.suites,
            "shape": self.shapes,
            "benchmark": self.config.benchmarks,
            "measured": {Path(cell).stem for cell in self.cells},
            "table": self.config.tables,
            "figure": self.drawable(),
        }
        fixed = {"target": "kq|k|q|v", "seed": r"\d+", "eps": "(-matched)?"}
        return {wildcard: any_of(names[wildcard]) for wildcard in names} | fixed

    # ----- settings -----

    def settings(self, *names: str, **sections: Any) -> Section:
        """Sections of the configuration: these as they are, others as passed (`JobConfig`)."""
        if self.config.partial is not None:
            names = ("partial", *names)
        whole = {name: getattr(self.config, name) for name in ("run", *names)}
        return dict(to_jsonable_python({**whole, **sections}))

    def tokenizer_settings(self, tokenizer: str) -> Section:
        spec, corpora = self.config.tokenizers[tokenizer], {}
        if spec.kind == "train":  # on its text, however that is packed
            text = _changed(self.config.corpora[spec.corpus], "length", "slices", "boundary")
            corpora[spec.corpus] = {**text, "length": 1, "slices": {}}
        return self.settings(tokenizers={tokenizer: _changed(spec)}, corpora=corpora)

    def corpus_settings(self, corpus: str) -> Section:
        return self.settings(corpora={corpus: _changed(self.config.corpora[corpus])})

    def imported_settings(self, model: str) -> Section:
        spec = _changed(self.config.models[model], "label", "published_as")
        return self.settings(models={model: {**spec, "label": model}})

    def pretraining_settings(self, model: str) -> Section:
        spec = _changed(self.config.models[model], "label", "published_as")
        # Which of several it is says the seed.
        source = {"kind": "pretrain", "recipe": spec["source"]["recipe"]}
        recipe = self.config.recipe_of(model).defining(exclude_defaults=True)
        recipes = {source["recipe"]: recipe}
        models = {model: {**spec, "label": model, "source": source}}
        return self.settings("device", models=models, recipes=recipes)

    def recovery_settings(self, model: str, cut: str) -> Section:
        recovery = self.config.recovery_of(self.recoveries[f"recovered/{model}/{cut}"])
        return self.settings("device", recovery=recovery.defining(exclude_defaults=True))

    def section_settings(self, section: str) -> Section:
        return self.settings("device", **{section: _changed(getattr(self.config, section))})

    def method_settings(self, method: str) -> Section:
        spec = _changed(self.config.methods[method], "label", "target", "colour", "dash")
        return self.settings(methods={method: spec})

    def suite_settings(self, suite: str) -> Section:
        spec = self.config.evaluation
        # Which variants are evaluated is no setting of an evaluation.
        some_documents = spec.suites[suite].documents is not None
        left_out = {"seeds"} if some_documents else {"seeds", "documents"}
        settings = spec.suites[suite].model_dump(mode="json", exclude=left_out)
        some = {"protocol": spec.protocol, "suites": {suite: settings}}
        return without_labels(self.settings("device", evaluation=some))

    def cell_settings(self, benchmark: str, measured: str) -> Section:
        """Of a benchmark what one cell is timed with, whatever other cells there are."""
        cell, spec = self.cell(benchmark, measured), self.config.benchmarks[benchmark]
        if isinstance(spec, MixerBenchmark):
            models, mixers = {}, {cell.subject: spec.mixers[cell.subject]}
            alone = {"mixers": mixers, "widths": [cell.width], "passes": [cell.mode]}
        else:
            model = self.config.models[cell.subject].model_dump(exclude={"published_as"})
            models = {cell.subject: model | NO_WEIGHTS}
            # A benchmark has one ratio at least; that of a model left whole may be any.
            alone = {"models": [cell.subject], "ratios": [cell.ratio or 0.5]}
            alone |= {"passes": [cell.mode]} if spec.kind == "model" else {}
        benchmarks = {benchmark: {**spec.model_dump(), **alone}}
        return without_labels(self.settings("device", benchmarks=benchmarks, models=models))

    def table_settings(self, *tables: str, figures: Iterable[str] = ()) -> Section:
        """What tables and figures show: themselves, and what they name."""
        config, spec = self.config, self.config.evaluation
        drawn = {name: config.figures[name] for name in figures}
        curves = [figure for figure in drawn.values() if isinstance(figure, QualityFigure)]
        of_figures = sorted({table for figure in curves for table in figure.tables} - {*tables})
        shown = {name: config.tables[name] for name in (*tables, *of_figures)}
        names = {*words(to_jsonable_python([shown, drawn]))}
        stages = {s for name in shown for s in getattr(shown[name], "columns", ())}
        benchmarks = {name: timed for name, timed in config.benchmarks.items() if name in names}
        names |= {m for timed in benchmarks.values() for m in getattr(timed, "models", ())}
        style = set() if drawn else {"colour", "dash"}
        recovery = config.recovery if (names | stages) & {*RECOVERED} else None
        return self.settings(
            "seeds",
            "eps",
            tables=shown,
            figures=drawn,
            benchmarks=benchmarks,
            models={name: model for name, model in config.models.items() if name in names},
            methods={
                name: method.model_dump(exclude=style)
                for name, method in config.methods.items()
                if name in names
            },
            evaluation={
                "protocol": spec.protocol,
                "suites": {
                    n: suite for n, suite in spec.suites.items() if names & {n, *suite.columns}
                },
            },
            # How a batch is divided is no part of what is shown.
            recovery=recovery and recovery.model_copy(update={"gradient_accumulation_steps": 1}),
        )

    # ----- text and models -----

    def text(self, corpus: str) -> list[str]:
        """Files that a corpus is read from; what is on the hub is known by its commit."""
        spec = self.config.corpora[corpus]
        if spec.kind == "documentation":
            return [f"{self.paths.root}/text/{spec.part}.jsonl"]
        # A pattern that matches nothing stands for itself: a file that is missing.
        patterns = spec.files if spec.kind == "local" else ()
        return sorted(str(file) for p in patterns for file in matching(p) or [Path(p)])

    def documentation(self) -> dict[str, str]:
        """Files of the documentation's text that corpora are read from, with the part they hold."""
        corpora = self.config.corpora.items()
        return {self.text(name)[0]: c.part for name, c in corpora if c.kind == "documentation"}

    def tokenizer_text(self, tokenizer: str) -> list[str]:
        """What it is trained on, or made from."""
        spec = self.config.tokenizers[tokenizer]
        if spec.kind == "local":
            return files_of(spec.path, tokenizer_files)
        return self.text(spec.corpus) if spec.kind == "train" else []

    def local_model(self, model: str) -> list[str]:
        source = self.config.models[model].source
        return files_of(source.path, model_files) if source.kind == "local" else []

    def import_mb(self, model: str) -> int:
        """Memory to take in a model, or to make one with random weights: all of it in float32. The
        1.3B models of the paper take 0.6 GB more than their weights."""
        return 3000 + 4 * self.config.models[model].parameters // 1_000_000

    @cached_property
    def locked(self) -> dict[tuple[str, str], str]:
        """The commits of what was downloaded."""
        lock = read_lock().items()
        return {(kind[:-1], name): p["commit"] for kind, pins in lock for name, p in pins.items()}

    def commit(self, kind: Kind, source: Any) -> str | None:
        """Of what comes from the hub: another one is another input."""
        return self.locked.get((kind, source.name)) if source.kind == "hub" else None

    def missing(self) -> list[str]:
        """Files that rules read, no rule makes, and that do not exist."""
        read = {"model": self.local_model, "tokenizer": self.tokenizer_text, "corpus": self.text}
        files: list[str] = []
        for need in (need for need in needs(self.config) if not need.hub):
            if need.kind == "task":
                files += [need.spec.file]
            else:
                files += read[need.kind](need.name)
        return sorted({file for file in files if not Path(file).exists()})

    def tokenizer(self, model: str) -> str:
        return f"{self.paths.root}/tokenizers/{self.config.models[model].tokenizer}"

    def preflight(self, model: str, ratio: Cut = 0.0) -> str:
        return self.paths.preflight(shape_of(self.config.models[model], ratio))

    # ----- pruning and recovery -----

    def calibration(self, model: str, method: str, target: str, seed: str) -> str | list[str]:
        """The calibration of a selection; none for methods that only read weights."""
        if not self.config.methods[method].calibrated:
            return []
        return self.paths.calibration(model, method, target, seed)

    def selections(self, w: Any) -> list[str]:
        return self.paths.selections(w.model, w.method, w.target, read_cut(w.ratio), w.seed)

    def widths(self, model: str, ratio: str) -> list[int]:
        """Channels of keys and of values that a head keeps."""
        left = cut_shape(self.config.models[model], read_cut(ratio))
        return [left.width, left.value_width]

    def method_code(self, method: str) -> list[str]:
        """The files that a method's selections depend on."""
        module = METHODS[self.config.methods[method].algorithm].module
        rrqr = ["src/statecut/pruning/rrqr.py"] if module.endswith("drrqr") else []
        return [source_file(module), *rrqr]

    def student(self, model: str, cut: str) -> str:
        variant = self.recoveries[f"recovered/{model}/{cut}"]
        return self.paths.model(self.config.student(variant))

    def student_preflight(self, model: str, cut: str) -> str:
        return self.preflight(model, self.recoveries[f"recovered/{model}/{cut}"].ratio)

    # ----- evaluation, benchmarks, analysis -----

    def demo_tasks(self) -> list[str]:
        """Files of the demo's own tasks, which are made from its text."""
        evaluation = self.config.evaluation
        tasks = [task for suite in evaluation.suites.values() for task in suite.tasks.values()]
        made = [t.file for t in tasks if t.file and t.task.startswith("demo_")]
        return sorted({*made}) if evaluation.made_from else []

    def task_files(self, suite: str) -> list[str]:
        tasks = self.config.evaluation.suites[suite].tasks.values()
        return [task.file for task in tasks if task.file and not task.not_attempted]

    def task_data(self, suite: str) -> Section:
        """Of each task on the hub: repository, configuration, split and commit."""
        tasks = self.config.evaluation.suites[suite].tasks.items()
        return {
            column: [*DATA_SETS[task.task], self.locked.get(("dataset", DATA_SETS[task.task][0]))]
            for column, task in tasks
            if task.file is None and not task.not_attempted
        }

    def cell(self, benchmark: str, measured: str) -> Measurement:
        return self.cells[f"{self.paths.root}/measurements/{benchmark}/{measured}.json"]

    def cell_shape(self, benchmark: str, measured: str) -> Section | None:
        """Of a whole model: its shape is part of what is timed."""
        model = self.config.models.get(self.cell(benchmark, measured).subject)
        return model.fla_config() if model else None

    def adapter(self, model: str) -> str:
        """The module that says all of a model's architecture."""
        return source_file(MODULES[self.config.models[model].architecture])

    def cell_adapter(self, benchmark: str, measured: str) -> str:
        """The same of what a cell times: a model, or one layer of a family of kernels."""
        subject, spec = self.cell(benchmark, measured).subject, self.config.benchmarks[benchmark]
        if isinstance(spec, MixerBenchmark):
            return source_file(RULES[spec.mixers[subject].architecture].layer.__module__)
        return self.adapter(subject)

    def analysed(self, subject: str) -> list[RankFigure]:
        """The figures that show the states of a model."""
        return [
            figure
            for name, figure in self.config.figures.items()
            if isinstance(figure, RankFigure)
            and subject in map(self.paths.subject, self.config.analyses(name))
        ]

    def heads(self, subject: str) -> list[tuple[int, int]]:
        """(layer, head) of every spectrum that a figure shows of a model."""
        figures = self.analysed(subject)
        return sorted({(f.layer, f.head) for f in figures if isinstance(f, SpectrumFigure)})

    def length(self, subject: str) -> int:
        """The longest stretch of tokens that a figure shows of a model."""
        return max(figure.tokens for figure in self.analysed(subject))

    # ----- tables and figures -----

    def table_sources(self, table: str) -> list[str | None]:
        """The results that a table is made of, in order, and None for what a partial run lacks."""
        if isinstance(self.config.tables[table], QualityTable):
            evaluations = self.config.evaluations(table)
            return self._available([self.paths.evaluation(v, suite) for v, suite in evaluations])
        return self._available(map(self.paths.measurement, self.config.timings(table)))

    def figure_sources(self, figure: str) -> list[str | None]:
        """The results that a figure is made of."""
        spec = self.config.figures[figure]
        if isinstance(spec, QualityFigure):  # whose gaps are in the frames
            return [self.paths.frame(table) for table in spec.tables]
        if spec.kind == "filters":
            return self._available([self.paths.base_model(spec.model)])
        if spec.kind == "sweep":
            cells = self.config.measurements(spec.benchmark)
            return self._available(map(self.paths.measurement, cells))
        return self._available(map(self.paths.analysis, self.config.analyses(figure)))

    def results(self) -> list[str]:
        """The results that all tables are made of."""
        tables = self.config.tables
        return sorted({source for table in tables for source in present(self.table_sources(table))})

    def of_model(self, model: str) -> list[str]:
        """What is measured of one training of a model, and figures of its filters."""
        config, paths = self.config, self.paths
        evaluated = [pair for pair in config.evaluations() if pair[0].model == model]
        analysed = [variant for variant in config.analyses() if variant.model == model]
        drawn = [n for n, f in config.figures.items() if f.kind == "filters" and f.model == model]
        return [
            *(paths.evaluation(*pair) for pair in evaluated),
            *map(paths.analysis, analysed),
            *(paths.figure(name, "svg") for name in drawn),
        ]

    def drawable(self) -> list[str]:
        """Figures that can be drawn: in a partial run, curves over tokens and spectra of the
        models that are there, and others if all their sources are."""
        return [
            name
            for name, figure in self.config.figures.items()
            if (any if isinstance(figure, RankFigure) else all)(self.figure_sources(name))
        ]

    def figures(self) -> dict[str, Figure]:
        """Figures that are shown: in a partial run, those that can be drawn, or were."""
        figures, drawable = self.config.figures, self.drawable()
        drawn = {
            n
            for n in figures
            if all(Path(self.paths.figure(n, e)).is_file() for e in ("pdf", "svg"))
        }
        return {name: figures[name] for name in figures if name in {*drawable, *drawn}}

    def shown(self) -> Config:
        """The configuration of what is shown."""
        return self.config.model_copy(update={"figures": self.figures()})

    def _available(self, paths: Iterable[str]) -> list[str | None]:
        partial = self.config.partial is not None
        return [None if partial and not _exists(path) else path for path in paths]


def present(paths: Iterable[str | None]) -> list[str]:
    return [path for path in paths if path is not None]


def words(value: Any) -> Iterator[str]:
    """All texts in settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from words(part)


def without_labels(settings: Any, *, keys: tuple[str, ...] = ("label", "caption")) -> Any:
    """Settings with empty labels and captions, for what does not show them."""
    if isinstance(settings, dict):
        return {
            key: "" if key in keys and isinstance(value, str) else without_labels(value, keys=keys)
            for key, value in settings.items()
        }
    if isinstance(settings, list):
        return [without_labels(value, keys=keys) for value in settings]
    return settings


def _changed(section: Any, *left_out: str) -> Section:
    """A section without values that are the default, so that a new key with one reruns nothing."""
    return dict(section.model_dump(mode="json", exclude_defaults=True, exclude={*left_out}))


def _exists(path: str) -> bool:
    """A file, or the folder of a model with its weights: loss curves may be all that is left."""
    return Path(path).is_file() or any(Path(path).glob("*.safetensors"))


def files_of(folder: str, used: Callable[[Path], list[Path]]) -> list[str]:
    """The files that are used of a folder; the folder itself if it is not there."""
    return [*map(str, used(Path(folder)))] if Path(folder).is_dir() else [folder]


def read_cut(text: str) -> Cut:
    """What was cut, from the name of a file."""
    return text if "x" in text else float(text)


def source_file(module: str) -> str:
    """The file of a module in the checkout."""
    return f"src/{module.replace('.', '/')}.py"


def any_of(names: Iterable[object]) -> str:
    """A pattern for these names; without any, one that matches nothing."""
    return "|".join(re.escape(str(name)) for name in names) or r"(?!)"
