"""The result of a selection, and all widths of one as an artefact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from statecut.arguments import Eps
from statecut.errors import InputError
from statecut.files import atomic_write, canonical_json
from statecut.models.checkpoint import Checkpoint, open_safetensors, read_tensors
from statecut.models.description import Description
from statecut.models.loaded import Loaded
from statecut.pruning.slicing import Change, Keep, Rotate, narrowed

CALIBRATION = ("text", "tokens", "seed", "sample_rows", "device")  # of its manifest, in a record


@dataclass(frozen=True, repr=False)
class Selection:
    """Which channels of keys, of values, or of both stay, and what is known about the choice.

    tensors: kept (layers, heads, width), or rotation (layers, heads, width, d_k) for PCA; where the
    method has them, per layer and head: scores (.., d_k), swaps, largest_gain, log_volume. Those of
    values begin with `values.`; about["values"] has the rest.
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

    def with_values(self, values: Selection) -> Selection:
        """This choice of key channels and another one's of value channels, of the same model."""
        about = {**self.about, "values": values.about["values"]}
        return Selection(self.tensors | values.tensors, about)

    def entry(self, model: Description, eps: Eps) -> dict[str, Any]:
        """What a record says of a cut: its `cut`."""
        full, kind = model.shape, model.architecture
        cut = narrowed(full, **self.changes())
        about = self.about.get("values", {}) | self.about
        known = ("method", "target", "model_digest", "calibration", "statecut", "values", "width",
                 "full_width")  # fmt: skip
        before, measured = kind.eps(model.config), about.get("calibration", {})
        after = kind.eps(kind.scaled_eps(model.config, kind.eps_factor(full, cut)))
        entry: dict[str, Any] = {
            **{name: about[name] for name in ("method", "target") if name in about},
            "options": {name: value for name, value in about.items() if name not in known},
            "keys": [cut.width, full.width],
            "values": [cut.value_width, full.value_width],
            "eps": [before, before if eps == "kept" else after],
            "calibration": {name: measured[name] for name in CALIBRATION if name in measured},
            "swaps": {},
            "kept": {},
        }
        for side, tensors in self.sides().items():
            if "kept" in tensors:
                entry["kept"][side] = tensors["kept"].tolist()
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


def save_selections(selections: Sequence[Selection], path: Path | str) -> None:
    """What a method chose at the widths 1, 2, 3, ..., in one file: kept channels as bits, of
    rotations the widest, whose first rows are the others, and what does not differ once."""
    about, tensors, by_width = selections[0].about, {}, []
    full = about.get("values", about)["full_width"]
    for name in selections[0].tensors:
        each = [selection.tensors[name] for selection in selections]
        if name.endswith("rotation"):
            tensors[name] = each[-1].contiguous()
        elif name.endswith("kept"):
            masks = [torch.zeros(*one.shape[:-1], full).scatter(-1, one, 1) for one in each]
            tensors[name] = torch.from_numpy(np.packbits(torch.stack(masks).bool().numpy(), -1))
        elif all(torch.equal(one, each[0]) for one in each):
            tensors[name] = each[0].contiguous()
        else:
            tensors[name] = torch.stack(each)
            by_width.append(name)
    # One entry: safetensors writes several in any order, and equal selections are equal bytes.
    metadata = {"about": canonical_json({**about, "by_width": by_width})}
    with atomic_write(path, force=True) as aside:
        save_file(tensors, aside, metadata=metadata)


def load_selection(path: Path | str, *, keys: int, values: int) -> Selection:
    """One width of `save_selections`, by whether that is of keys or of values."""
    with open_safetensors(Path(path)) as file:
        about = json.loads(file.metadata()["about"])
    by_width = about.pop("by_width")
    side, tensors = about.get("values", about), dict(read_tensors(Path(path)))
    width = values if "values" in about else keys
    for name, tensor in tensors.items():
        if name.endswith("rotation"):
            tensors[name] = tensor[..., :width, :]
        elif name.endswith("kept"):
            bits = np.unpackbits(tensor[width - 1].numpy(), axis=-1, count=side["full_width"])
            tensors[name] = torch.from_numpy(bits).nonzero()[:, -1].view(*bits.shape[:-1], width)
        elif name in by_width:
            tensors[name] = tensor[width - 1]
    side["width"] = width
    return Selection(tensors, about)
