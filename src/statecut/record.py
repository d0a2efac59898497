"""What a model is and how it was made: statecut.json for programs, README.md for people.

statecut.json has an entry for each command or function that made the model from another, oldest
first: `base` (name and digest), `cut`, `refit`, `recovery` or `training`, `measured`, `command`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statecut.errors import InputError
from statecut.files import read_json
from statecut.models.architectures import architecture
from statecut.models.architectures.base import softmax_kinds
from statecut.version import __version__

FILE, CARD = "statecut.json", "README.md"
# Pruned models of both kinds were loaded with its releases from this one to 0.6.0. Without
# `.models`, those from 0.3.2 to 0.5.0 tell transformers nothing of their models.
OLDEST_FLA = "0.2.2"
NUMBERS = {
    "perplexity": "{:.2f}",
    "recurrent_state_bytes": "{:,}",
    "cache_bytes_per_request": "{:,}",
    "parameters": "{:,}",
}
"""What is measured of a model, and how it is written."""
_UNLOADED = ("transformers has no class for {}. It loads with the code of the original model (its\n"
             ".py files), which Statecut neither runs nor copies.")  # fmt: skip

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """How a model came about."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, folder: Path | str) -> Record:
        """Of a model folder; empty if Statecut did not make it."""
        file = Path(folder) / FILE
        entries = read_json(file) if file.is_file() else []
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"{file} is not a list of what made the model: delete or restore it")
        return cls(tuple(entries))

    def then(self, **entry: Any) -> Record:
        return Record((*self.entries, {"statecut": __version__, **entry}))

    def also(self, **more: Any) -> Record:
        """With more in the last entry, or in one of its own."""
        return (
            Record((*self.entries[:-1], {**self.last, **more}))
            if self.entries
            else self.then(**more)
        )

    @property
    def last(self) -> Entry:
        return self.entries[-1]

    @property
    def bases(self) -> list[str]:
        """The digests of the models on disk that it was cut from."""
        digests = [entry["base"].get("digest") for entry in self.entries if "cut" in entry]
        return [digest for digest in digests if digest]

    def facts(self) -> dict[str, str]:
        """Of the last entry, in words."""
        facts = cut_facts(self.last.get("cut", {})) | refit_facts(self.last.get("refit", {}))
        for part in ("recovery", "training", "notes"):
            facts |= {key: str(value) for key, value in self.last.get(part, {}).items()}
        return facts

    def numbers(self) -> list[list[str]]:
        """The table of what was measured of each model: its head, then its rows."""
        models = self.last.get("measured", {}).get("models", {})
        rows = [
            [name.replace("_", " "), *(form.format(model[name]) for model in models.values())]
            for name, form in NUMBERS.items()
            if all(name in model for model in models.values())
        ]
        left_out = not self.last.get("refit", {}).get("written", True)
        heads = [name + ", left out" * (left_out and name == "refitted") for name in models]
        return [["", *heads], *rows] if models else []

    def files(self, name: str, config: dict[str, Any]) -> dict[str, str]:
        """statecut.json and README.md of a model of that name, whose config.json is `config`."""
        # Lists of numbers, the kept channels, on one line each.
        lists = r"\[\s+([-\d.,\s]+?)\s+\]"
        text = json.dumps(self.entries, indent=1) + "\n"
        text = re.sub(lists, lambda match: f"[{' '.join(match[1].split())}]", text)
        return {FILE: text, CARD: self._card(name, config)}

    def _card(self, name: str, config: dict[str, Any]) -> str:
        entry, kind = self.last, architecture(config)
        base = entry.get("base", {}).get("name")
        words = {"cut": "cut", "refit": "refitted", "recovery": "recovered", "training": "trained"}
        done = [part for part in words if entry.get(part, {}).get("written", part in entry)]
        made = " and ".join(words[part] for part in done)
        sentence = f"{base or name}, {made} by Statecut."
        rows = ["| " + " | ".join(row) + " |" for row in self.numbers()]
        rows[1:1] = ["|---" * len(self.numbers()[0]) + "|"] if rows else []
        earlier = [f"- before: {_cut_in_words(e['cut'])}" for e in self.entries[:-1] if "cut" in e]
        facts = [f"- {key}: {value}" for key, value in self.facts().items()]
        compared = [f"    {line}" for line in entry.get("compared", ())]
        # The class for text alone would leave out the rest of a multimodal model.
        auto_class = f"AutoModelFor{'ImageTextToText' if 'vision_config' in config else 'CausalLM'}"
        needs = f"Loads with flash-linear-attention {OLDEST_FLA} or newer:"
        loads = [
            *([f"{needs}\n"] if kind.library == "fla.models" else []),
            *([] if kind.library == "transformers" else [f"    import {kind.library}"]),
            f"    from transformers import {auto_class}",
            f'    model = {auto_class}.from_pretrained("{name}")',
            *_on_a_cpu(name, config),
        ]
        parts = [
            "---",
            *([f"base_model: {base}"] if base else []),
            "library_name: transformers\ntags:\n- statecut\n- linear-attention\n---\n",
            f"# {name}\n\n{sentence}\n",
            *([*rows, "", self._held_out(), ""] if rows else []),
            *earlier,
            *facts,
            f"- made by: statecut {__version__}\n",
            *(["Compared:\n", *compared, ""] if compared else []),
            *([f"    {entry['command']}\n"] if "command" in entry else []),
            *(loads if kind.since else [_UNLOADED.format(kind.model_type)]),
        ]
        return "\n".join(parts) + "\n"

    def _held_out(self) -> str:
        measured = self.last["measured"]
        if "tokens" not in measured:
            return "Perplexity was not measured."
        return f"Perplexity of {measured['tokens']:,} tokens held out of {measured['text']}."

    def lines(self) -> Iterator[str]:
        """For the screen."""
        yield from self.last.get("compared", ())
        if self.last.get("compared"):
            yield ""
        facts = {name: fact for name, fact in self.facts().items() if name != "warning"}
        left = max(map(len, [*facts, "recurrent state bytes  "]))
        for row in self.numbers():
            yield f"{row[0]:{left}}" + "".join(f"{cell:>16}" for cell in row[1:])
        if self.numbers():
            yield f"{'':{left}}  {self._held_out()}"
            yield ""
        for key, value in facts.items():
            yield f"{key:{left}}  {value}"


def record_of(model: Any) -> Record:
    """Of a model in memory."""
    return getattr(model, "statecut_record", Record())


def stored_dtype(model: Any) -> str:
    """What the weights of a model in memory were in, in the files that it came from."""
    return getattr(model, "statecut_dtype", "")


def set_origin(model: Any, record: Record, dtype: str) -> None:
    model.statecut_record, model.statecut_dtype = record, dtype


def _cut_in_words(cut: Mapping[str, Any]) -> str:
    sides = {"key": cut["keys"], "value": cut["values"]}
    few = [f"{kept} of {full} {side} channels" for side, (kept, full) in sides.items()
           if kept < full]  # fmt: skip
    return f"{' and '.join(few)} per head kept by {cut['method']}"


def cut_facts(cut: Mapping[str, Any]) -> dict[str, str]:
    if not cut:
        return {}
    facts = {"method": f"{cut['method']}{' (default)' if cut.get('default_method') else ''}"}
    if "target" in cut:
        facts["target"] = cut["target"]
    facts |= {name: str(value) for name, value in cut.get("options", {}).items()}
    for side in ("keys", "values"):
        kept, full = cut[side]
        if kept < full:
            asked = cut.get("asked", {}).get(side, kept)
            why = f" for {cut['engine']}" if "engine" in cut else f"; --round-to 1 keeps {asked}"
            rounded = "" if asked == kept else f" ({asked} asked, rounded up{why})"
            facts[f"{side[:-1]} channels per head"] = f"{kept} of {full}{rounded}"
    facts["output norm's eps"] = _eps_in_words(cut)
    for side, (swaps, heads) in cut.get("swaps", {}).items():
        facts[f"swaps of {side}"] = f"{swaps} in {heads} heads"
    if calibration := cut.get("calibration"):
        of = f" of {calibration['text']['source']}" if "text" in calibration else ""
        facts["calibration"] = f"{calibration['tokens']:,} tokens{of}, seed {calibration['seed']}"
    return facts


def _eps_in_words(cut: Mapping[str, Any]) -> str:
    """What a cut did to the eps of the output norm, and why."""
    before, after = cut["eps"]
    if before is None:
        return "as it was: no config of this model says it"
    if before == after:
        return f"{before:g}, as it was"
    sides = [cut["keys"], cut["values"]]
    if math.isclose(after, before * cut["values"][1] / cut["values"][0]):  # no d_k^-1/2, as Mamba2
        sides = [cut["values"]]
    factors = [f"{full}/{kept}" for kept, full in sides if kept < full]
    scaled = ""
    if cut["values"][0] < cut["values"][1]:
        scaled = f", and the output projection times sqrt({factors[-1]})"
    why = f"times {' x '.join(factors)}{scaled}: cut channels count as zeros"
    return f"{before:g} -> {after:.6g} ({why})"


def refit_facts(refit: Mapping[str, Any]) -> dict[str, str]:
    if not refit:
        return {}
    names = " and ".join(f"{name} of {n} layers" for name, n in refit["projections"].items())
    took = f" in {refit['seconds']:.0f} s" if "seconds" in refit else ""
    facts = {"refitted": f"{names}, on {refit['tokens']:,} tokens{took}"}
    left = "of the cut model's error in the residual stream, mean of the projections"
    facts["error left"] = f"{refit['error']:.3f} {left}"
    if not refit.get("written", True):
        facts["refitted"] = "tried, and left out: the text held out was not better"
    return facts


def _on_a_cpu(name: str, config: dict[str, Any]) -> list[str]:
    """How to load it there; nothing for a model that Statecut does not run."""
    if architecture(config).library == "transformers":
        reason = "Where flash-linear-attention is installed, transformers uses its kernels, which"
    elif softmax_kinds(config):
        return []
    else:
        reason = "The kernels of flash-linear-attention"
    part = ", the text model alone" if "vision_config" in config else ""
    return [
        f"\n{reason} need a GPU. On a CPU, in plain PyTorch{part}:\n",
        f'    import statecut\n    model = statecut.load("{name}")',
    ]
