"""The result of a selection, as an artefact: one file per model, method, target and ratio."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from statecut.arguments import Eps
from statecut.errors import InputError
from statecut.files import atomic_write, canonical_json
from statecut.models.checkpoint import Checkpoint, open_safetensors, read_tensors
from statecut.models.description import Description
from statecut.models.loaded import Loaded
from statecut.models.shapes import MixerShape
from statecut.pruning.slicing import Change, Keep, Rotate, eps_factor

CALIBRATION = ("text", "tokens", "seed", "sample_rows", "device")  # of its manifest, in a record


@dataclass(frozen=True, repr=False)
class Selection:
    """Which channels of keys, of values, or of both stay, and what is known about the choice.

    tensors: kept (layers, heads, width), or rotation (layers, heads, width, d_k) for PCA; where the
    method has them, per layer and head: scores (.., d_k), swaps, largest_gain, log_volume; with a
    calibration: condition_before, condition_after, effective_rank_before, effective_rank_after, of
    the raw keys over all calibration tokens. Those of values begin with `values.`, with the
    conditioning of what enters the output projection; about["values"] has the rest.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"Selection({self.about.get('values', self.about)['method']}: {', '.join(shapes)})"

    @property
    def width(self) -> int:
        return int(self.about["width"])

    def change(self) -> Change | None:
        """Of the key channels."""
        if "rotation" in self.tensors:
            return Rotate(self.tensors["rotation"])
        return Keep(self.tensors["kept"]) if "kept" in self.tensors else None

    def value_change(self) -> Keep | None:
        return Keep(self.tensors["values.kept"]) if "values.kept" in self.tensors else None

    def changes(self) -> dict[str, Any]:
        """Both, as `slice_model` takes them."""
        return {"keys": self.change(), "values": self.value_change()}

    def cut(self, shape: MixerShape) -> MixerShape:
        """The shape of a model with the channels that stay."""
        keys, values = self.change(), self.value_change()
        return replace(
            shape,
            width=keys.width if keys else shape.width,
            value_width=values.width if values else shape.value_width,
        )

    def with_values(self, values: Selection) -> Selection:
        """This choice of key channels and another one's of value channels, of the same model."""
        about = {**self.about, "values": values.about["values"]}
        return Selection(self.tensors | values.tensors, about)

    def entry(self, model: Description, eps: Eps) -> dict[str, Any]:
        """What a record says of a cut: its `cut`."""
        full, cut, kind = model.shape, self.cut(model.shape), model.architecture
        about = self.about.get("values", {}) | self.about
        known = ("method", "target", "model_digest", "calibration", "statecut", "values", "width",
                 "full_width")  # fmt: skip
        before, measured = kind.eps(model.config), about.get("calibration", {})
        after = kind.eps(kind.scaled_eps(model.config, eps_factor(full, cut)))
        entry: dict[str, Any] = {
            **{name: about[name] for name in ("method", "target") if name in about},
            "options": {name: value for name, value in about.items() if name not in known},
            "keys": [cut.width, full.width],
            "values": [cut.value_width, full.value_width],
            "eps": [before, before if eps == "kept" else after],
            "calibration": {name: measured[name] for name in CALIBRATION if name in measured},
            "condition": {},
            "effective_rank": {},
            "swaps": {},
            "kept": {},
        }
        for side, tensors in self.sides().items():
            if "kept" in tensors:
                entry["kept"][side] = tensors["kept"].tolist()
            if "condition_before" in tensors:
                for fact, of in (("condition", Tensor.median), ("effective_rank", Tensor.mean)):
                    pair = (tensors[f"{fact}_{when}"] for when in ("before", "after"))
                    entry[fact][side] = [float(of(values)) for values in pair]
            if "swaps" in tensors:
                entry["swaps"][side] = [int(tensors["swaps"].sum()), tensors["swaps"].numel()]
        return entry

    def sides(self) -> dict[str, dict[str, Tensor]]:
        """What is known of the choice of keys, and of values, each if they were cut."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            side = "values" if name.startswith("values.") else "keys"
            found.setdefault(side, {})[name.removeprefix("values.")] = tensor
        return found

    def filled_up(self) -> Iterator[tuple[str, int, int]]:
        """A side, in how many of its heads channels had to be filled up, and of how many."""
        for side, tensors in self.sides().items():
            if "log_volume" in tensors and (short := int(tensors["log_volume"].isneginf().sum())):
                yield side, short, tensors["log_volume"].numel()

    def check_model(self, checkpoint: Checkpoint | Loaded) -> None:
        if self.about["model_digest"] != (digest := checkpoint.digest()):
            raise InputError(
                f"this selection was made for the model {self.about['model_digest'][:12]}, but "
                f"{checkpoint.place} is {digest[:12]}: select again for it"
            )

    def save(self, path: Path | str) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        with atomic_write(path, force=True) as aside:
            save_file(tensors, aside, metadata={"about": canonical_json(self.about)})

    @classmethod
    def load(cls, path: Path | str) -> Selection:
        with open_safetensors(Path(path)) as file:
            about = json.loads(file.metadata()["about"])
        return cls(dict(read_tensors(Path(path))), about)
