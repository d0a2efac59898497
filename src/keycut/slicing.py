"""Slicing: fewer key channels make a smaller, ordinary model.

A change says what becomes of the channels of one head; everything else here is where they lie.
All of it works on tensors by name and on config.json: no model class is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from keycut.artefact import atomic_write, to_json
from keycut.errors import InputError
from keycut.models.architectures.base import (
    Architecture,
    KeyShape,
    KeyTensor,
    Role,
    text_config,
)
from keycut.models.checkpoint import (
    WEIGHTS,
    Checkpoint,
    copy_companions,
    current_name,
    with_current_names,
)


class Change(Protocol):
    """Channels (heads, d_k, ...) of one tensor of a layer, to (heads, width, ...)."""

    @property
    def width(self) -> int: ...

    def __call__(self, index: int, role: Role, channels: Tensor) -> Tensor:
        """`index` counts the layers that have a delta rule."""


@dataclass(frozen=True)
class Keep:
    """Keep the channels `kept` (layers, heads, width), in that order."""

    kept: Tensor

    @property
    def width(self) -> int:
        return self.kept.shape[-1]

    def __call__(self, index: int, role: Role, channels: Tensor) -> Tensor:
        heads = torch.arange(len(channels))[:, None]
        return channels[heads, self.kept[index]]


@dataclass(frozen=True)
class Rotate:
    """Rotate by T (layers, heads, width, d_k), whose rows are orthonormal.

    Rows of a projection become T W. A depthwise filter has no rotated form; the paper takes
    (T∘T) W, the best one for channels that are uncorrelated at all lags.
    """

    rotation: Tensor

    @property
    def width(self) -> int:
        return self.rotation.shape[-2]

    def __call__(self, index: int, role: Role, channels: Tensor) -> Tensor:
        T = self.rotation[index].double()
        T = T.square() if role == "filter" else T
        return torch.einsum("hwd,hd...->hw...", T, channels.double()).to(channels.dtype)


@dataclass(frozen=True)
class Pad:
    """Add channels of zeros at the end of each head; `cut_back` takes them away again.

    Zero keys and queries leave norms, states and gradients as they were. Only the scale d_k^-1/2
    of the kernel differs, which the output norm takes out but for its eps: `padded_eps`.
    """

    width: int

    def __call__(self, index: int, role: Role, channels: Tensor) -> Tensor:
        missing = self.width - channels.shape[1]
        if missing < 0:
            raise InputError(f"padding to {self.width}: the model has {channels.shape[1]} channels")
        zeros = channels.new_zeros(channels.shape[0], missing, *channels.shape[2:])
        return torch.cat([channels, zeros], 1)


def cut_back(shape: KeyShape, width: int) -> Keep:
    """The change that keeps the first `width` channels of every head: the end of a `Pad`."""
    return Keep(torch.arange(width).expand(len(shape.layers), shape.heads, width))


def padded_eps(eps: float, width: int, padded: int) -> float:
    """The eps of the output norm with which a padded model computes what the narrow one does.

    The scale shrinks the output by sqrt(width / padded), its square by width / padded; with an
    eps that shrinks alike, the norm sees the same proportions.
    """
    return eps * width / padded


def places(keys: list[KeyTensor], shape: KeyShape) -> Tensor:
    """(keys, heads, d_k): the places of key channels on their axis of one tensor."""
    return torch.from_numpy(np.stack([key.layout(shape) for key in keys]))


def change_tensor(
    tensor: Tensor, keys: list[KeyTensor], shape: KeyShape, change: Change, index: int, name: str
) -> Tensor:
    """The tensor with its key channels changed and everything else on that axis as it was.

    `keys` is more than one for a tensor that holds queries and keys.
    """
    first = keys[0]
    old, new = places(keys, shape), places(keys, replace(shape, width=change.width))
    rows = tensor.movedim(first.axis, 0)
    if len(rows) != old.numel() + first.others(shape):
        raise InputError(
            f"{name} has {len(rows) - first.others(shape)} key channels, but the config says "
            f"{shape.heads} heads of {shape.width}: a model whose layers differ in width cannot be "
            "sliced"
        )
    result = rows.new_empty(new.numel() + first.others(shape), *rows.shape[1:])
    for key, before, after in zip(keys, old, new, strict=True):
        result[after] = change(index, key.role, rows[before])
    rest = np.setdiff1d(np.arange(len(rows)), old)
    result[np.setdiff1d(np.arange(len(result)), new)] = rows[rest]
    return result.movedim(0, first.axis).contiguous()


def change_channels(
    tensors: Iterable[tuple[str, Tensor]], kind: Architecture, shape: KeyShape, change: Change
) -> dict[str, Tensor]:
    """All tensors of a model, those over key channels changed."""
    over_keys = kind.key_tensors(shape)
    result = {}
    for name, tensor in tensors:
        if name in over_keys:
            index, keys = over_keys[name]
            tensor = change_tensor(tensor, keys, shape, change, index, name)
        result[name] = tensor
    required = {
        kind.name(layer, key) for layer in shape.layers for key in (kind.q_proj, kind.k_proj)
    }
    missing = sorted(required - set(result))
    if missing:
        raise InputError(f"the model has no {missing[0]}, so its key channels cannot be sliced")
    return result


def sliced_bytes(checkpoint: Checkpoint, width: int, dtype: torch.dtype | None) -> int:
    """What the weights of the smaller model will take on a disk."""
    shape = checkpoint.shape
    over_keys = checkpoint.architecture.key_tensors(shape)
    total = 0
    for name, tensor in checkpoint.tensors():
        numbers = tensor.numel()
        if (current := current_name(name, checkpoint.architecture)) in over_keys:
            _, keys = over_keys[current]
            lost = len(keys) * shape.heads * (shape.width - width)
            numbers -= lost * (numbers // tensor.shape[keys[0].axis])
        to = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        total += numbers * to.itemsize
    return total


def slice_model(
    checkpoint: Checkpoint,
    change: Change,
    out: Path | str,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    card: str | None = None,
    force: bool = False,
) -> None:
    """Write the changed model to a folder that its stock library loads."""
    kind, shape = checkpoint.architecture, checkpoint.shape
    if not change.width >= 1:
        raise InputError(f"a width of {change.width} leaves no channel")
    with atomic_write(out, force=force, folder=True) as aside:
        tensors = change_channels(
            with_current_names(checkpoint.tensors(), kind).items(), kind, shape, change
        )
        config: dict[str, Any] = kind.resized(checkpoint.config, change.width)
        if dtype is not None:
            tensors = {
                n: t.to(dtype) if t.is_floating_point() and not n.startswith(kind.beyond) else t
                for n, t in tensors.items()
            }
            for part in (config, text_config(config)):
                part["dtype"] = str(dtype).removeprefix("torch.")
                part.pop("torch_dtype", None)  # what older transformers called it
        tensors = {kind.stored_name(name): tensor for name, tensor in tensors.items()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / "config.json").write_text(to_json(config))
        copy_companions(checkpoint.folder, aside)
        if card is not None:
            (aside / "README.md").write_text(card)
