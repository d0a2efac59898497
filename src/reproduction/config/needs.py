"""What a run needs to be there before it starts: models, tokenizers, text and tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from reproduction.config.evaluation import DATA_SETS
from reproduction.config.models import Model
from reproduction.config.run import Config
from statecut.errors import InputError
from statecut.hub import HubItem, Kind

ONLY_TIMED = ("config.json",)
"""Of a model that only benchmarks name the shape counts, and its weights are random."""


class Need(NamedTuple):
    """One thing that the run reads and does not make."""

    kind: str  # tokenizer, model, corpus or task
    name: str
    spec: Any  # its section
    hub: HubItem | None  # None for what is on this machine


def needs(config: Config) -> Iterator[Need]:
    """All of them, tokenizers before the models that use them, each task once."""
    evaluated = needed_models(config)
    tokenizers = {m.tokenizer: config.tokenizers[m.tokenizer] for m in evaluated.values()}
    for name, spec in tokenizers.items():
        if spec.kind != "train":
            # One pattern, because a download refuses a pattern that matches nothing, and newer
            # tokenizers have neither special_tokens_map.json nor added_tokens.json.
            yield Need("tokenizer", name, spec, _hub("model", spec, ("*token*",)))
    for name, model in evaluated.items():
        if model.source.kind in ("hub", "local"):
            yield Need("model", name, model, _hub("model", model.source))
    timed = {m for b in config.benchmarks.values() if b.kind != "mixer" for m in b.models}
    for name in sorted(timed - {*evaluated}):
        if item := _hub("model", config.models[name].source, ONLY_TIMED):
            yield Need("model", name, config.models[name], item)
    texts = [*_used(config), *(spec.corpus for spec in tokenizers.values() if spec.kind == "train")]
    for name in dict.fromkeys(text.split("/")[0] for text in texts):
        if (corpus := config.corpora[name]).kind != "documentation":
            patterns = corpus.files if corpus.kind == "hub" else ()
            yield Need("corpus", name, corpus, _hub("dataset", corpus, patterns))
    suites = dict.fromkeys(suite for _, suite in config.evaluations())
    tasks = [task for name in suites for task in config.evaluation.suites[name].tasks.values()]
    for task in {(t.task, t.file): t for t in tasks if t.not_attempted is None}.values():
        if task.file is None:
            item = HubItem("dataset", DATA_SETS[task.task][0], task.revision)
            yield Need("task", task.task, task, item)
        elif task.task in DATA_SETS or config.evaluation.made_from is None:
            yield Need("task", task.task, task, None)


def _hub(kind: Kind, source: Any, patterns: tuple[str, ...] = ()) -> HubItem | None:
    return HubItem(kind, source.name, source.revision, patterns) if source.kind == "hub" else None


def _used(config: Config) -> Iterator[str]:
    """Slices that models are trained, pruned, recovered, evaluated or analysed on."""
    for model in needed_models(config).values():
        if model.source.kind == "pretrain":
            yield config.recipes[model.source.recipe].data
    variants = config.variants()
    calibrated = any(v.pruned and config.methods[v.method].calibrated for v in variants)
    if config.calibration and (calibrated or any(v.refitted for v in variants)):
        yield config.calibration.data
    if config.recovery and any(variant.recovered for variant in variants):
        yield config.recovery.data
    if config.evaluation.made_from:
        yield config.evaluation.made_from
    if config.analysis and config.analyses():
        yield config.analysis.data


def hub_sources(config: Config) -> tuple[HubItem, ...]:
    """Everything on the hub that the run needs, each once, with the patterns of all."""
    merged: dict[Any, HubItem] = {}
    for item in (need.hub for need in needs(config) if need.hub):
        known = merged.get(item.key, item)
        if known.revision != item.revision:
            both = f"{known.revision} and {item.revision}"
            raise InputError(f"{item.name}: the run asks for revisions {both}; give it one")
        patterns = tuple(sorted({*item.patterns, *known.patterns}))
        merged[item.key] = replace(item, patterns=patterns)
    return tuple(merged.values())


def needed_models(config: Config) -> dict[str, Model]:
    """Models whose weights the run needs: those it evaluates, and those whose filters it shows."""
    shown = [figure.model for figure in config.figures.values() if figure.kind == "filters"]
    names = [*(variant.model for variant in config.variants()), *shown]
    return {name: config.models[name] for name in names}


def without_trainer(config: Config) -> list[str]:
    """Models that the run trains with flame, if that (`make flame`) is not installed here."""
    if find_spec("flame") and find_spec("torchtitan"):
        return []
    sources = {name: model.source for name, model in needed_models(config).items()}
    return [
        name
        for name, source in sources.items()
        if source.kind == "pretrain" and config.recipes[source.recipe].trainer == "flame"
    ]
