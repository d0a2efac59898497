"""Slicing: fewer key channels make a smaller, ordinary model.

A change says what becomes of the channels of one head; everything else here is where they lie.
All of it works on tensors by name and on config.json: no model class is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from keycut.artefact import atomic_write
from keycut.errors import InputError
from keycut.models.architectures.base import (
    Architecture,
    ChannelTensor,
    MixerShape,
    Role,
    text_config,
)
from keycut.models.checkpoint import Checkpoint, rewrite, with_current_names

MIXED_WIDTHS = "a model whose layers differ in width cannot be sliced"


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


def cut_back(shape: MixerShape, width: int) -> Keep:
    """The change that keeps the first `width` channels of every head: the end of a `Pad`."""
    return Keep(torch.arange(width).expand(len(shape.layers), shape.heads, width))


def padded_eps(eps: float, width: int, padded: int) -> float:
    """The eps of the output norm with which a padded model computes what the narrow one does.

    The scale shrinks the output by sqrt(width / padded), its square by width / padded; with an
    eps that shrinks alike, the norm sees the same proportions.
    """
    return eps * width / padded


def places(key: ChannelTensor, shape: MixerShape) -> Tensor:
    """(entries, heads, d_k): the places of key channels on their axis of a tensor."""
    return torch.from_numpy(key.layout(shape)).view(-1, shape.heads, shape.width)


def change_tensor(
    tensor: Tensor, keys: list[ChannelTensor], shape: MixerShape, change: Change, index: int
) -> Tensor:
    """The tensor with its key channels changed and everything else on that axis as it was.

    `keys` is more than one for a tensor that holds queries and keys.
    """
    first, narrow = keys[0], replace(shape, width=change.width)
    old, new = (torch.cat([places(key, s) for key in keys]) for s in (shape, narrow))
    roles = [key.role for key in keys for _ in places(key, shape)]
    rows = tensor.movedim(first.axis, 0)
    result = rows.new_empty(new.numel() + first.others(shape), *rows.shape[1:])
    for role, before, after in zip(roles, old, new, strict=True):
        result[after] = change(index, role, rows[before])
    rest = np.setdiff1d(np.arange(len(rows)), old)
    result[np.setdiff1d(np.arange(len(result)), new)] = rows[rest]
    return result.movedim(0, first.axis).contiguous()


def check_channels(headers: Mapping[str, Tensor], kind: Architecture, shape: MixerShape) -> None:
    """An error unless the tensors, of which only names and shapes are looked at, have the channels
    that the config says."""
    required = {
        kind.name(layer, key) for layer in shape.layers for key in (kind.q_proj, kind.k_proj)
    }
    missing = sorted(required - set(headers))
    if missing:
        raise InputError(f"the model has no {missing[0]}, so its key channels cannot be sliced")
    for name, (_, keys) in kind.channel_tensors(shape).items():
        if name not in headers:
            continue
        channels = headers[name].shape[keys[0].axis] - keys[0].others(shape)
        if channels != sum(places(key, shape).numel() for key in keys):
            raise InputError(
                f"{name} has {channels} key channels, but the config says {shape.heads} heads of "
                f"{shape.width}: {kind.mend or MIXED_WIDTHS}"
            )
    values = shape.value_heads * shape.value_width
    for name in (kind.mixer.format(layer=layer) + kind.o_proj for layer in shape.layers):
        if name in headers and headers[name].shape[1] != values:
            raise InputError(
                f"{name} takes {headers[name].shape[1]} value channels, but the config says "
                f"{shape.value_heads} heads of {shape.value_width}"
            )


def check_sliceable(checkpoint: Checkpoint) -> None:
    """An error if the tensors of a folder contradict its config; none of them is read."""
    kind = checkpoint.architecture
    check_channels(with_current_names(checkpoint.headers(), kind), kind, checkpoint.shape)


def change_channels(
    tensors: Iterable[tuple[str, Tensor]], kind: Architecture, shape: MixerShape, change: Change
) -> dict[str, Tensor]:
    """All tensors of a model, those over key channels changed."""
    result = dict(tensors)
    check_channels(result, kind, shape)
    for name, (index, keys) in kind.channel_tensors(shape).items():
        if name in result:
            result[name] = change_tensor(result[name], keys, shape, change, index)
    return result


def sliced_bytes(checkpoint: Checkpoint, width: int, dtype: torch.dtype | None) -> int:
    """What the weights of the smaller model will take on a disk."""
    kind, shape = checkpoint.architecture, checkpoint.shape
    over_keys = kind.channel_tensors(shape)
    total = 0
    for name, header in with_current_names(checkpoint.headers(), kind).items():
        numbers = header.numel()
        if name in over_keys:
            _, keys = over_keys[name]
            lost = (
                sum(len(places(key, shape)) for key in keys) * shape.heads * (shape.width - width)
            )
            numbers -= lost * (numbers // header.shape[keys[0].axis])
        total += numbers * sliced_dtype(name, header, kind, dtype).itemsize
    return total


def sliced_dtype(
    name: str, tensor: Tensor, kind: Architecture, dtype: torch.dtype | None
) -> torch.dtype:
    """What a tensor becomes in a model whose weights are to be `dtype`: what is not the model's own
    is left as it is."""
    own = tensor.is_floating_point() and not name.startswith(kind.beyond)
    return dtype if dtype and own else tensor.dtype


def slice_model(
    checkpoint: Checkpoint,
    change: Change,
    out: Path | str,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    card: str | None = None,
    force: bool = False,
) -> None:
    """Write the changed model to a folder that its stock library loads.

    Files are the model's own, one of them at a time in memory. Tensors that are not the model's
    (`Architecture.beyond`) are copied as they are.
    """
    kind, shape = checkpoint.architecture, checkpoint.shape
    if not change.width >= 1:
        raise InputError(f"a width of {change.width} leaves no channel")
    check_sliceable(checkpoint)
    config: dict[str, Any] = kind.resized(checkpoint.config, change.width)
    if dtype is not None:
        for part in (config, text_config(config)):
            part["dtype"] = str(dtype).removeprefix("torch.")
            part.pop("torch_dtype", None)  # what older transformers called it
    over_keys = kind.channel_tensors(shape)

    def new_tensor(name: str, tensor: Tensor) -> Tensor:
        to = sliced_dtype(name, tensor, kind, dtype)
        if name in over_keys:
            index, keys = over_keys[name]
            tensor = change_tensor(tensor, keys, shape, change, index)
        return tensor.to(to)

    with atomic_write(out, force=force, folder=True) as aside:
        rewrite(checkpoint, aside, new_tensor, config)
        if card is not None:
            (aside / "README.md").write_text(card)
