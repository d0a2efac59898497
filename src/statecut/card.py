"""The README.md that every model carries: what it is, and how it was made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from statecut import __version__
from statecut.models.architectures import architecture
from statecut.models.architectures.base import softmax_kinds
from statecut.models.shapes import MixerShape

# Pruned models of both kinds were loaded with its releases from this one to 0.6.0. Without
# `.models`, those from 0.3.2 to 0.5.0 tell transformers nothing of their models.
OLDEST_FLA = "0.2.2"
TAGS = "tags:\n- statecut\n- linear-attention\n---\n"
TABLE = "| | |\n|---|---|\n"
MAKER = "made by"


def card(
    name: str,
    sentence: str,
    facts: Mapping[str, object],
    *,
    command: str,
    config: dict[str, Any],
    base: str | None = None,
    table: Sequence[str] = (),
) -> str:
    """The text. `config` is the model's own config.json, `base` the model it was made from, and
    `table` the lines of what it was compared with."""
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
    library = architecture(config).library
    stock = library == "fla.models"
    needs = f"Loads with flash-linear-attention {OLDEST_FLA} or newer.\n\n" if stock else ""
    imports = "" if library == "transformers" else f"    import {library}\n"
    # The class for text alone would leave out the rest of a multimodal model.
    multimodal = "vision_config" in config
    auto_class = f"AutoModelFor{'ImageTextToText' if multimodal else 'CausalLM'}"
    # As code: it is a fact of this model, and of none that is made from it.
    compared = "".join(f"    {line}\n" for line in table)
    compared = f"Compared by the perplexity of text held out:\n\n{compared}\n" if table else ""
    header = f"base_model: {base}\n" if base else ""
    return (
        f"---\n{header}library_name: transformers\n"
        f"{TAGS}\n"
        f"# {name}\n\n{sentence}\n\n"
        f"{TABLE}{rows}| {MAKER} | statecut {__version__} |\n\n"
        f"{compared}    {command}\n\n{needs}"
        f"{imports}"
        f"    from transformers import {auto_class}\n"
        f'    model = {auto_class}.from_pretrained("{name}")\n'
        f"{_on_a_cpu(name, config)}"
    )


def stored_facts(folder: Path) -> dict[str, object]:
    """What the card in a folder says of how its model was made, if Statecut wrote it."""
    file = folder / "README.md"
    text = file.read_text(errors="replace") if file.is_file() else ""
    header, _, body = text.partition(TAGS)
    _, _, rows = body.partition(TABLE)
    rows, maker, _ = rows.partition(f"| {MAKER} |")
    if not (header.startswith("---\n") and maker):
        return {}
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", rows, re.MULTILINE))


def channels_cut(cut: MixerShape, full: MixerShape) -> dict[str, object]:
    """How many channels of keys and of values were left, where fewer."""
    sides = {"key": (cut.width, full.width), "value": (cut.value_width, full.value_width)}
    return {
        f"{side} channels per head": f"{left} of {all_}"
        for side, (left, all_) in sides.items()
        if left < all_
    }


def cut_before(folder: Path) -> dict[str, object]:
    """That the model in a folder was itself cut from another, if its card says so."""
    facts = stored_facts(folder)
    names = [f"{side} channels per head" for side in ("key", "value")]
    cuts = [f"{facts[name]} {name}" for name in names if name in facts]
    if not cuts:
        return {}
    cut = f"to {' and '.join(cuts)} by {facts.get('method', 'an unknown method')}"
    earlier = facts.get("base model was cut")
    return {"base model was cut": f"{earlier}, then {cut}" if earlier else cut}


def _on_a_cpu(name: str, config: dict[str, Any]) -> str:
    """How to load it there; nothing for a model that Statecut does not run."""
    if architecture(config).library == "transformers":
        reason = "Where flash-linear-attention is installed, transformers uses its kernels, which"
    elif softmax_kinds(config):
        return ""
    else:
        reason = "The kernels of flash-linear-attention"
    part = ", the text model alone" if "vision_config" in config else ""
    return (
        f"\n{reason} need a GPU. On a CPU, in plain PyTorch{part}:\n\n"
        f'    import statecut.models\n    model = statecut.models.load("{name}")\n'
    )
