"""What a run needs to be there before it starts: models, tokenizers and text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from reproduction.config.evaluation import DATA_SETS, Task
from reproduction.config.models import Model
from reproduction.config.run import Config
from reproduction.config.sources import Corpus, FromHub, Tokenizer
from statecut.hub import HubItem, Key

# tokenizer*, special_tokens_map.json and added_tokens.json. One pattern, because a download
# refuses a pattern that matches nothing, and newer tokenizers have only the first.
TOKENIZER_FILES = ("*token*",)

CONFIG_FILE = ("config.json",)

# What `make flame` installs.
FLAME = ("flame", "torchtitan")


def hub_sources(config: Config) -> tuple[HubItem, ...]:
    """Everything on the hub that the run needs, each repository once, with the patterns of all."""
    items: dict[Key, HubItem] = {}
    for _, item in hub_items(config):
        known = items.get(item.key, item).patterns
        items[item.key] = replace(item, patterns=tuple(sorted({*item.patterns, *known})))
    return tuple(items.values())


def hub_items(config: Config) -> Iterator[tuple[str, HubItem]]:
    """What is needed from the hub, by the path of the section that names it.

    Of a model that only benchmarks name the shape counts, and its weights are random: its config is
    enough. A task that a local file stands in for, or that is not attempted, needs nothing.
    """
    for name, model in needed_models(config).items():
        if (source := model.source).kind == "hub":
            yield f"models.{name}.source", HubItem("model", source.name, source.revision)
    for name, hub in only_timed(config).items():
        yield f"models.{name}.source", HubItem("model", hub.name, hub.revision, CONFIG_FILE)
    for name, tokenizer in needed_tokenizers(config).items():
        if tokenizer.kind == "hub":
            item = HubItem("model", tokenizer.name, tokenizer.revision, TOKENIZER_FILES)
            yield f"tokenizers.{name}", item
    for name, corpus in needed_corpora(config).items():
        if corpus.kind == "hub":
            item = HubItem("dataset", corpus.name, corpus.revision, corpus.files)
            yield f"corpora.{name}", item
    for path, task in needed_tasks(config):
        if task.file is None:
            data_set, _, _ = DATA_SETS[task.task]
            yield path, HubItem("dataset", data_set, task.revision)


def needed_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """Tokenizers of the models that the run needs."""
    names = dict.fromkeys(model.tokenizer for model in needed_models(config).values())
    return {name: config.tokenizers[name] for name in names}


def needed_corpora(config: Config) -> dict[str, Corpus]:
    """Corpora that models are trained, pruned, evaluated or analysed on; and tokenizers'."""
    sources = [model.source for model in needed_models(config).values()]
    variants = config.variants()
    slices = [config.recipes[s.recipe].data for s in sources if s.kind == "pretrain"]
    calibrated = (v.pruned and config.methods[v.method].calibrated for v in variants)
    if config.calibration and (any(calibrated) or any(v.refitted for v in variants)):
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


def needed_tasks(config: Config) -> Iterator[tuple[str, Task]]:
    """Tasks that models are evaluated on, by the path of their section."""
    for name in dict.fromkeys(suite for _, suite in config.evaluations()):
        for column, task in config.evaluation.suites[name].tasks.items():
            if task.not_attempted is None:
                yield f"evaluation.suites.{name}.tasks.{column}", task


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


def without_trainer(config: Config) -> list[str]:
    """Models that the run trains with flame, if that is not installed here."""
    if all(find_spec(package) for package in FLAME):
        return []
    return [
        name
        for name, model in needed_models(config).items()
        if model.source.kind == "pretrain"
        and config.recipes[model.source.recipe].trainer == "flame"
    ]
