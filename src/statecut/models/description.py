"""What config.json and the headers of the weights' files say of a model. Nothing here needs torch:
what is wrong with a request is said before that is imported."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from statecut.errors import InputError
from statecut.files import read_json
from statecut.models.architectures import architecture
from statecut.models.architectures.base import Config, depth, text_config
from statecut.models.shapes import MixerShape

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Description:
    """A model by its config: its architecture, its shape, and what other widths it could have."""

    def __init__(self, config: Config, place: Path | str) -> None:
        self.config, self.place = config, place  # the place is for messages
        try:
            self.text_config = text_config(config)
            self.architecture = architecture(config)
            self.shape: MixerShape = self.architecture.shape(config)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise InputError(f"{place}: config.json is not a model's: {error}") from None

    @cached_property
    def passthrough_prefixes(self) -> tuple[str, ...]:
        """How the current names of tensors begin that are no part of the text model. Layers behind
        its last one predict further tokens."""
        kind, text = self.architecture, self.text_config
        first, more = depth(text), text.get("num_nextn_predict_layers") or 0
        return (*kind.passthrough, *(f"{kind.prefix}{first + layer}." for layer in range(more)))

    def check_runs(self) -> None:
        """An error where the model has no class here, and for fla's hybrids: softmax layers need
        flash-attn, and buffers of no file."""
        if problem := self.architecture.missing():
            raise InputError(
                f"{self.place}: {problem}; it can be cut without text: --method l1 --no-refit"
            )
        layers = depth(self.text_config)
        if self.architecture.library != "transformers" and len(self.shape.layers) < layers:
            raise InputError(
                f"{self.place}: Statecut runs no softmax attention of flash-linear-attention; it "
                "can cut such a model without text: --method l1 --no-refit"
            )

    def check_narrower(self, teacher: Description) -> None:
        """An error unless a model of this shape can have been cut from another."""
        if self.architecture is not teacher.architecture:
            problem = f"it is a {teacher.architecture.model_type}"
        elif not self.shape.narrower_than(teacher.shape):
            theirs, ours = (
                f"{shape.width} x {shape.value_width}" for shape in (teacher.shape, self.shape)
            )
            problem = (
                f"d_k x d_v are {theirs} there and {ours} here, so nothing was cut; give the "
                "pruned model first, then the one it was cut from"
            )
        else:
            return
        raise self.not_cut_from(teacher, problem)

    def not_cut_from(self, teacher: Description, problem: str) -> InputError:
        return InputError(
            f"{teacher.place} is not the model that {self.place} was cut from: {problem}"
        )

    def can_express(self, shape: MixerShape) -> bool:
        """Whether a config with these widths says what it was to say."""
        kind = self.architecture
        if kind.square and shape.width != shape.value_width:
            return False
        return kind.shape(kind.resized(self.config, shape.width, shape.value_width)) == shape

    def resized(self, width: int, value_width: int | None) -> Config:
        """The config of the model with these widths, or an error if it cannot have them."""
        values = value_width or self.shape.value_width
        if self.architecture.square and width != values:
            one = min(width, values)
            raise InputError(
                f"{self.place}: keys and values of a {self.architecture.model_type} have one "
                f"width, not {width} and {values}: give --keys {one} --values {one}"
            )
        if not self.can_express(replace(self.shape, width=width, value_width=values)):
            raise InputError(
                f"{self.place}: the config of a {self.architecture.model_type} cannot express "
                f"heads of {width} key and {values} value channels"
            )
        return self.architecture.resized(self.config, width, value_width)


class ModelFolder(Description):
    """A model on disk."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise InputError(f"{self.folder} is not a model folder: it has no config.json")
        super().__init__(read_json(self.folder / "config.json"), self.folder)
        self.files: dict[str, str] = {}  # of each tensor
        self.parameters = 0  # in its files
        index, beside = self.folder / INDEX, {path.name for path in self.folder.iterdir()}
        try:
            weight_map = read_json(index).get("weight_map", {}) if INDEX in beside else {}
            shards = sorted(set(weight_map.values())) if INDEX in beside else [WEIGHTS]
        except (AttributeError, TypeError):
            raise InputError(f"{index}: has no weight_map; download or copy it again") from None
        missing = [name for name in shards if name not in beside]
        if missing == [WEIGHTS] and any(self.folder.glob("*.bin")):
            raise InputError(
                f"{self.folder} has pickled weights only, which can run code when they are read: "
                "load the model where you trust them, and call save_pretrained once"
            )
        if missing == [WEIGHTS]:
            raise InputError(f"{self.folder} is not a model folder: it has no {WEIGHTS} or {INDEX}")
        if missing or not shards:
            raise InputError(
                f"{self.folder}: {len(missing)} of {len(shards)} files that {INDEX} names are "
                f"missing ({', '.join(missing[:3])}): download or copy the model again"
            )
        for shard in shards:
            with open_safetensors(self.folder / shard, "np") as file:  # which needs no torch
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if not weight_map or weight_map.get(name) == shard:
                        self.files[name] = shard
                        self.parameters += math.prod(file.get_slice(name).get_shape())
        for name in weight_map.keys() - self.files.keys():
            raise InputError(
                f"{self.folder}: {INDEX} says that {name} is in {weight_map[name]}, and it is not: "
                "download or copy the model again"
            )


def open_safetensors(path: Path, framework: str = "pt") -> Any:
    """A safetensors file, or an error that says what is wrong with it."""
    if not path.is_file():
        raise InputError(f"{path} is missing")
    try:
        path.open().close()  # of a file that may not be read the library says that it is missing
        return safe_open(path, framework)
    except SafetensorError as error:
        raise InputError(f"{path} is cut off or damaged: {error}") from None
    except PermissionError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
