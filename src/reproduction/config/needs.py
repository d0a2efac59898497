"""What a run needs to be there before it starts: models, tokenizers and text."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from reproduction.config.evaluation import DATA_SETS, Task
from reproduction.config.models import Model
from reproduction.config.run import Config
from reproduction.config.sources import Corpus, FromHub, Tokenizer
from statecut.hub import HubItem


def hub_sources(config: Config) -> tuple[HubItem, ...]:
    """Everything on the hub that the run needs, each revision once, with the patterns of all.

    Of a model that only benchmarks name the shape counts, and its weights are random: its config is
    enough. A task that a local file stands in for, or that is not attempted, needs nothing.
    """
    models = [m.source for m in needed_models(config).values() if m.source.kind == "hub"]
    items = [HubItem("model", source.name, source.revision) for source in models]
    for hub in only_timed(config).values():
        items.append(HubItem("model", hub.name, hub.revision, ("config.json",)))
    for spec in needed_tokenizers(config).values():
        if spec.kind == "hub":
            # One pattern, because a download refuses a pattern that matches nothing, and newer
            # tokenizers have neither special_tokens_map.json nor added_tokens.json.
            items.append(HubItem("model", spec.name, spec.revision, ("*token*",)))
    for corpus in needed_corpora(config).values():
        if corpus.kind == "hub":
            items.append(HubItem("dataset", corpus.name, corpus.revision, corpus.files))
    for task in needed_tasks(config):
        if task.file is None:
            items.append(HubItem("dataset", DATA_SETS[task.task][0], task.revision))
    merged: dict[object, HubItem] = {}
    for item in items:
        known = merged.get((item.key, item.revision), item).patterns
        patterns = tuple(sorted({*item.patterns, *known}))
        merged[item.key, item.revision] = replace(item, patterns=patterns)
    return tuple(merged.values())


def needed_models(config: Config) -> dict[str, Model]:
    """Models whose weights the run needs: those it evaluates, and those whose filters it shows."""
    shown = [figure.model for figure in config.figures.values() if figure.kind == "filters"]
    names = [*(variant.model for variant in config.variants()), *shown]
    return {name: config.models[name] for name in names}


def only_timed(config: Config) -> dict[str, FromHub]:
    """Hub models that benchmarks name and nothing else does: their shape counts."""
    timed = {m for b in config.benchmarks.values() if b.kind != "mixer" for m in b.models}
    names = sorted(timed - {*needed_models(config)})
    sources = {name: config.models[name].source for name in names}
    return {name: source for name, source in sources.items() if source.kind == "hub"}


def needed_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """Tokenizers of the models that the run needs."""
    names = [model.tokenizer for model in needed_models(config).values()]
    return {name: config.tokenizers[name] for name in names}


def needed_corpora(config: Config) -> dict[str, Corpus]:
    """Corpora that models are trained, pruned, evaluated or analysed on; and tokenizers'."""
    sources, variants = [m.source for m in needed_models(config).values()], config.variants()
    slices = [config.recipes[s.recipe].data for s in sources if s.kind == "pretrain"]
    calibrated = any(v.pruned and config.methods[v.method].calibrated for v in variants)
    if config.calibration and (calibrated or any(v.refitted for v in variants)):
        slices.append(config.calibration.data)
    if config.recovery and any(variant.recovered for variant in variants):
        slices.append(config.recovery.data)
    if config.evaluation.made_from:
        slices.append(config.evaluation.made_from)
    if config.analysis and config.analyses():
        slices.append(config.analysis.data)
    names = [data.split("/")[0] for data in slices]
    names += [t.corpus for t in needed_tokenizers(config).values() if t.kind == "train"]
    return {name: config.corpora[name] for name in names}


def needed_tasks(config: Config) -> list[Task]:
    """Tasks that models are evaluated on."""
    suites = dict.fromkeys(suite for _, suite in config.evaluations())
    tasks = [task for name in suites for task in config.evaluation.suites[name].tasks.values()]
    return [task for task in tasks if task.not_attempted is None]


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
