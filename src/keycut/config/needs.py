"""What a run needs to be there before it starts: models, tokenizers and text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from keycut.config.evaluation import DATA_SETS
from keycut.hub import DEFAULT_PATTERNS, HubItem

if TYPE_CHECKING:
    from keycut.config.models import Model
    from keycut.config.run import Config

# tokenizer*, special_tokens_map.json and added_tokens.json. One pattern, because a download
# refuses a pattern that matches nothing, and newer tokenizers have only the first.
TOKENIZER_FILES = ("*token*",)

CONFIG_FILE = ("config.json",)

# What `make flame` installs.
FLAME = ("flame", "torchtitan")


def wanted(config: Config) -> Iterator[tuple[str, HubItem]]:
    """What is needed from the hub, by the path of the section that names it.

    Of a model that only benchmarks name the shape counts, and its weights are random: its config is
    enough. A task that a local file stands in for, or that is not attempted, needs nothing.
    """
    models = needed_models(config)
    tokenizers = {m.tokenizer: config.tokenizers[m.tokenizer] for m in models.values()}
    corpora = [corpus for corpus, _ in packed(config)]
    corpora += [t.corpus for t in tokenizers.values() if t.kind == "train"]

    timed = {m for b in config.benchmarks.values() if b.kind != "mixer" for m in b.models}
    for name, model in config.models.items():
        if (source := model.source).kind == "hub" and (name in models or name in timed):
            patterns = DEFAULT_PATTERNS["model"] if name in models else CONFIG_FILE
            item = HubItem("model", source.name, source.revision, patterns)
            yield f"models.{name}.source", item
    for name, tokenizer in tokenizers.items():
        if tokenizer.kind == "hub":
            item = HubItem("model", tokenizer.name, tokenizer.revision, TOKENIZER_FILES)
            yield f"tokenizers.{name}", item
    for name in dict.fromkeys(corpora):
        if (corpus := config.corpora[name]).kind == "hub":
            item = HubItem("dataset", corpus.name, corpus.revision, corpus.files)
            yield f"corpora.{name}", item
    suites = config.evaluation.suites
    for name in dict.fromkeys(suite for _, suite in config.evaluations()):
        for column, task in suites[name].tasks.items():
            if task.file is None and task.not_attempted is None:
                data_set, _, _ = DATA_SETS[task.task]
                item = HubItem("dataset", data_set, task.revision, DEFAULT_PATTERNS["dataset"])
                yield f"evaluation.suites.{name}.tasks.{column}", item


def needed_models(config: Config) -> dict[str, Model]:
    """Models whose weights the run needs: those it evaluates, and those whose filters it shows."""
    shown = [figure.model for figure in config.figures.values() if figure.kind == "filters"]
    names = [*(variant.model for variant in config.variants()), *shown]
    return {name: config.models[name] for name in names}


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


def packed(config: Config) -> tuple[tuple[str, str], ...]:
    """Corpora that something is trained, calibrated or analysed on, each with the tokenizer of
    the model that reads it."""
    models = needed_models(config)
    variants = config.variants()
    pairs = [
        (config.recipes[model.source.recipe].data, model)
        for model in models.values()
        if model.source.kind == "pretrain"
    ]
    for variant in variants:
        model = config.models[variant.model]
        pruned = variant.pruned and config.methods[variant.method].calibrated
        if config.calibration and pruned:
            pairs.append((config.calibration.data, model))
        if config.recovery and variant.rft == "post":
            pairs.append((config.recovery.data, model))
    if config.evaluation.made_from:
        pairs += [(config.evaluation.made_from, model) for model in models.values()]
    if config.analysis:
        pairs += [(config.analysis.data, config.models[v.model]) for v in config.analyses()]
    return tuple(dict.fromkeys((data.split("/")[0], model.tokenizer) for data, model in pairs))
