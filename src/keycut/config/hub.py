"""What a run needs from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from keycut.hub import DEFAULT_PATTERNS, HubItem

if TYPE_CHECKING:
    from keycut.config.models import Model
    from keycut.config.run import Config, Variant

# tokenizer*, special_tokens_map.json and added_tokens.json. One pattern, because a download
# refuses a pattern that matches nothing, and newer tokenizers have only the first.
TOKENIZER_FILES = ("*token*",)


def wanted(config: Config) -> Iterator[tuple[str, HubItem]]:
    """What is needed from the hub, by the path of the section that names it.

    A model that only benchmarks name needs nothing: its shape counts, and its weights are random.
    Nor is there data of evaluation tasks: a configuration does not say where on the hub it is.
    """
    variants = config.variants()
    shown = [figure.model for figure in config.figures.values() if figure.kind == "filters"]
    models = {name: config.models[name] for name in [*(v.model for v in variants), *shown]}
    tokenizers = {m.tokenizer: config.tokenizers[m.tokenizer] for m in models.values()}
    corpora = [name.split("/")[0] for name in _slices(config, variants, models.values())]
    corpora += [t.corpus for t in tokenizers.values() if t.kind == "train"]

    for name, model in models.items():
        if (source := model.source).kind == "hub":
            item = HubItem("model", source.name, source.revision, DEFAULT_PATTERNS["model"])
            yield f"models.{name}.source", item
    for name, tokenizer in tokenizers.items():
        if tokenizer.kind == "hub":
            item = HubItem("model", tokenizer.name, tokenizer.revision, TOKENIZER_FILES)
            yield f"tokenizers.{name}", item
    for name in dict.fromkeys(corpora):
        if (corpus := config.corpora[name]).kind == "hub":
            item = HubItem("dataset", corpus.name, corpus.revision, corpus.files)
            yield f"corpora.{name}", item


def _slices(config: Config, variants: Iterable[Variant], models: Iterable[Model]) -> Iterator[str]:
    """Text that something is trained, calibrated or analysed on, as corpus/slice."""
    for model in models:
        if model.source.kind == "pretrain":
            yield config.recipes[model.source.recipe].data
    if config.calibration and any(
        variant.pruned and config.methods[variant.method].calibrated for variant in variants
    ):
        yield config.calibration.data
    if config.recovery and any(variant.rft == "post" for variant in variants):
        yield config.recovery.data
    if config.analysis and config.analyses():
        yield config.analysis.data
