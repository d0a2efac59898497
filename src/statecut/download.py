"""`statecut download`: models of the hub, fetched at pinned commits, opened and described."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from statecut.errors import InputError
from statecut.files import read_json
from statecut.hub.downloads import DOWNLOADS, Downloads, HubItem
from statecut.hub.fetch import fetch
from statecut.models.architectures import ARCHITECTURES
from statecut.models.checkpoint import Checkpoint, check_parameters


def download(
    names: Sequence[str],
    *,
    update: bool = False,
    downloads: Downloads = DOWNLOADS,
    endpoint: str | None = None,
) -> Iterator[str]:
    """A line about each model, once all are there."""
    items = [HubItem("model", name) for name in names]
    failures = fetch(items, downloads, update=names if update else (), endpoint=endpoint)
    if failures:
        again = "not downloaded (the same command goes on from here):"
        raise InputError("\n  ".join([again, *failures.values()]))
    for item in items:
        folder = downloads.resolve(*item.key)
        yield f"{item.name} at {downloads.commits()[item.key][:8]}: {describe(folder)}"


def describe(folder: Path) -> str:
    """Layers, heads and parameters of a model; an error if its weights do not fit its class. Of
    weights only the headers are read."""
    model_type = read_json(folder / "config.json").get("model_type")
    if model_type not in ARCHITECTURES:
        return f"model_type {model_type!r} is none that Statecut knows: only its hashes are checked"
    checkpoint = Checkpoint(folder)
    shape = checkpoint.shape
    widths = dict.fromkeys((shape.width, shape.value_width))
    layers = (
        f"{checkpoint.text_config['num_hidden_layers']} layers, {shape.heads} heads of "
        f"{' x '.join(map(str, widths))}"
    )
    try:
        count, ignored = check_parameters(checkpoint)
    except ImportError as error:  # a hybrid's class needs flash-attn
        return f"{layers}; parameters are not compared, its class cannot be made here: {error}"
    unused = f"; {len(ignored)} tensors are not used ({ignored[0]}, ...)" if ignored else ""
    return f"{layers}, {count:,} parameters{unused}"
