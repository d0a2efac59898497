"""The README.md that every model carries: what it is, and how it was made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.config.training import Recipe
from statecut import __version__
from statecut.arguments import Eps
from statecut.arguments import width as width_of
from statecut.models.architectures import architecture
from statecut.models.architectures.base import softmax_kinds
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import MixerShape
from statecut.pruning.refit import Refit
from statecut.pruning.selection import Selection
from statecut.pruning.slicing import eps_factor

# Pruned models of both kinds were loaded with its releases from this one to 0.6.0. Without
# `.models`, those from 0.3.2 to 0.5.0 tell transformers nothing of their models.
OLDEST_FLA = "0.2.2"
TAGS = "tags:\n- statecut\n- linear-attention\n---\n"
TABLE = "| | |\n|---|---|\n"
MAKER = "made by"


def card(
    name: str, sentence: str, facts: Mapping[str, object], *, command: str, config: dict[str, Any],
    base: str | None = None, table: Sequence[str] = (),
) -> str:  # fmt: skip
    """The text. `config` is the model's own config.json, `base` the model it was made from, and
    `table` the lines of what it was compared with."""
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items())
    library = architecture(config).library
    stock = library == "fla.models"
    needs = f"Loads with flash-linear-attention {OLDEST_FLA} or newer.\n\n" if stock else ""
    imports = "" if library == "transformers" else f"    import {library}\n"
    # The class for text alone would leave out the rest of a multimodal model.
    auto_class = (
        "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    )
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


def cut_before(folder: Path) -> dict[str, object]:
    """That the model in a folder was itself cut from another, if its card says so."""
    facts = stored_facts(folder)
    cuts = [
        f"{facts[f'{side} channels a head']} {side} channels a head"
        for side in ("key", "value")
        if f"{side} channels a head" in facts
    ]
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


def eps_in_words(base: Checkpoint, cut: MixerShape, eps: Eps) -> str:
    """What a cut does to the eps of the output norm, and why."""
    kind, full = base.architecture, base.shape
    before = kind.eps(base.config)
    factors = [
        f"{old}/{new}"
        for old, new in ((full.width, cut.width), (full.value_width, cut.value_width))
        if new < old
    ]
    projection = ""
    if eps == "matched" and cut.value_width < full.value_width:
        projection = f", and the output projection times sqrt({factors[-1]})"
    if before is None:
        return f"as it was: no config of {kind.model_type} says it{projection}"
    if eps == "kept":
        return f"{before:g}, as it was"
    after = before * eps_factor(full, cut)
    why = f"times {' x '.join(factors)}{projection}: cut channels count as zeros"
    return f"{before:g} -> {after:.6g} ({why})"


def pruned_facts(
    selection: Selection, ratio: float | None, base: Checkpoint, eps: Eps
) -> dict[str, object]:
    """Without a ratio the widths say what was cut."""
    about, values = selection.about, selection.about.get("values")
    facts: dict[str, object] = {"method": (values or about)["method"]}
    if selection.change():
        facts["target"] = about["target"]
        if ratio is not None:
            facts["ratio"] = ratio_in_words(ratio, about["width"], about["full_width"])
        facts["key channels a head"] = f"{about['width']} of {about['full_width']}"
    if values:
        facts["value channels a head"] = f"{values['width']} of {values['full_width']}"
    facts["output norm's eps"] = eps_in_words(base, selection.cut(base.shape), eps)
    facts["base model digest"] = about["model_digest"]
    if "calibration" in about:
        text = about["calibration"]["text"]
        facts["calibration"] = (
            f"{about['calibration']['tokens']:,} tokens of {text['source']} ({text['revision']}), "
            f"seed {about['calibration']['seed']}"
        )
    return facts


def ratio_in_words(ratio: float, width: int, full: int) -> str:
    """The ratio that was asked for, and the one that was cut if the width was rounded up."""
    rounded = width != width_of(full, ratio)
    return f"{ratio} asked, {1 - width / full:.3g} cut" if rounded else str(ratio)


def refitted_facts(result: Refit, teacher: Checkpoint) -> dict[str, object]:
    matrices = Counter(fit.name.split(".")[-2] for fit in result.fits)
    names = " and ".join(f"{name} of {count} layers" for name, count in matrices.items())
    error = sum(fit.error for fit in result.fits) / len(result.fits)
    return {
        "refitted": f"{names}, on {result.tokens:,} tokens",
        "error left": f"{error:.3f} of the sliced model's, in the stream behind them, in the mean",
        "refitted to": teacher.digest(),
    }


def pretrained_facts(recipe: Recipe, length: int) -> dict[str, object]:
    return {
        "trained by": recipe.trainer,
        "tokens": f"{recipe.sequences * length:,} of {recipe.data}",
        "steps": recipe.steps,
        "learning rate": recipe.learning_rate,
        "seed": recipe.seed,
    }


def channels_cut(cut: MixerShape, full: MixerShape) -> dict[str, object]:
    """Those that were cut, as `pruned_facts` says them."""
    sides = {"key": (cut.width, full.width), "value": (cut.value_width, full.value_width)}
    return {
        f"{side} channels a head": f"{width} of {whole}"
        for side, (width, whole) in sides.items()
        if width < whole
    }
