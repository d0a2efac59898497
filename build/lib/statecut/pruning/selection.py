"""The result of a selection, as an artefact: one file per model, method, target and ratio."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from statecut.errors import InputError
from statecut.files import atomic_write, canonical_json
from statecut.models.checkpoint import Checkpoint, open_safetensors, read_tensors
from statecut.models.shapes import MixerShape
from statecut.pruning.slicing import Change, Keep, Rotate


@dataclass(frozen=True)
class Selection:
    """Which channels of keys stay, or of values, or of both, and what there is to know about the
    choice.

    tensors: kept (layers, heads, width), or rotation (layers, heads, width, d_k) for PCA; and as
    far as the method has them, per layer and head: scores (.., d_k), swaps, largest_gain,
    log_volume. With a calibration: condition_before, condition_after, effective_rank_before,
    effective_rank_after, of the raw keys over all calibration tokens.

    What there is of values begins with `values.`: values.kept (layers, value heads, width) and so
    on, with the conditioning of what enters the output projection; about["values"] has the rest.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]

    @property
    def width(self) -> int:
        return int(self.about["width"])

    @property
    def value_width(self) -> int:
        return int(self.about["values"]["width"])

    def change(self) -> Change | None:
        """Of the key channels."""
        if "rotation" in self.tensors:
            return Rotate(self.tensors["rotation"])
        return Keep(self.tensors["kept"]) if "kept" in self.tensors else None

    def value_change(self) -> Keep | None:
        return Keep(self.tensors["values.kept"]) if "values.kept" in self.tensors else None

    def cut(self, shape: MixerShape) -> MixerShape:
        """Of a model with the channels that stay."""
        keys, values = self.change(), self.value_change()
        return replace(
            shape,
            width=keys.width if keys else shape.width,
            value_width=values.width if values else shape.value_width,
        )

    def with_values(self, values: Selection) -> Selection:
        """This choice of key channels and another one's of value channels."""
        if self.about["model_digest"] != values.about["model_digest"]:
            raise InputError("the choices of key and of value channels are of different models")
        if "values" not in values.about:
            raise InputError(
                "the second selection is of key channels; `select_values` is of values"
            )
        chosen = {name: t for name, t in values.tensors.items() if name.startswith("values.")}
        return Selection(self.tensors | chosen, {**self.about, "values": values.about["values"]})

    def check_model(self, checkpoint: Checkpoint) -> None:
        if self.about["model_digest"] != (digest := checkpoint.digest()):
            raise InputError(
                f"this selection was made for the model {self.about['model_digest'][:12]}, but "
                f"{checkpoint.folder} is {digest[:12]}: select again for it"
            )

    def save(self, path: Path | str) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        with atomic_write(path, force=True) as aside:
            save_file(tensors, aside, metadata={"about": canonical_json(self.about)})

    @classmethod
    def load(cls, path: Path | str) -> Selection:
        path = Path(path)
        with open_safetensors(path) as file:
            metadata = file.metadata() or {}
        if "about" not in metadata:
            raise InputError(f"{path} is no selection")
        return cls(dict(read_tensors(path)), json.loads(metadata["about"]))
