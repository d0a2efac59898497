"""Slicing: fewer channels of keys, of values, or of both make a smaller, ordinary model.

A change says what becomes of the channels of one head; everything else here is where they lie.
All of it works on tensors by name and on config.json: no model class is needed.

Between the values and the output projection is a norm over the channels of a head, whose weight all
heads share. Heads may keep different channels, so the weight w is first folded into the projection,

    W_o (w * x) = (W_o diag(w, w, ...)) x

a gate included, which multiplies x channel by channel. That is exact.

A cut model computes what the whole one does with the cut channels set to zero, if two numbers
follow. The rule scales its output by d_k^-1/2, and the norm takes a mean over d_v channels: of D
key and V value channels k and v are left, and the mean square that the norm divides by is D/k V/v
times that of the whole model, which matters beside eps. So eps becomes D/k V/v eps, for all norms
of the model where its config has one number for all. And what the norm puts out is sqrt(v/V) times
the whole model's, so the output projection is multiplied by sqrt(V/v).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from statecut.arguments import Eps
from statecut.errors import InputError
from statecut.files import atomic_write
from statecut.models.architectures.base import Architecture, ChannelTensor, Role, text_config
from statecut.models.checkpoint import Checkpoint, rewrite, with_current_names
from statecut.models.shapes import Channels, MixerShape

logger = logging.getLogger(__name__)

EMBEDDINGS = ("embeddings.weight", "embed_tokens.weight")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHER_WIDTHS = "it is of another model, or its layers differ in width, which cannot be sliced"


class Change(Protocol):
    """Channels (heads, n, ...) of one tensor of a layer, to (heads, width, ...)."""

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
    of the kernel differs, which the output norm takes out but for its eps: `eps_factor`.
    """

    width: int

    def __call__(self, index: int, role: Role, channels: Tensor) -> Tensor:
        missing = self.width - channels.shape[1]
        if missing < 0:
            raise InputError(f"padding to {self.width}: the model has {channels.shape[1]} channels")
        zeros = channels.new_zeros(channels.shape[0], missing, *channels.shape[2:])
        return torch.cat([channels, zeros], 1)


def cut_back(shape: MixerShape, width: int, channels: Channels = "key") -> Keep:
    """The change that keeps the first `width` channels of every head: the end of a `Pad`."""
    heads, _ = shape.size(channels)
    return Keep(torch.arange(width).expand(len(shape.layers), heads, width))


def eps_factor(before: MixerShape, after: MixerShape) -> float:
    """What the eps of the output norm is multiplied by, so that with other widths, and zeros for
    the channels that only one of them has, the norm sees the same proportions."""
    return before.width * before.value_width / (after.width * after.value_width)


@dataclass(frozen=True)
class Slicer:
    """What becomes of each tensor of a model, in its own type or, where it is computed, in float64.
    Without a change of values nothing is folded."""

    kind: Architecture
    shape: MixerShape
    keys: Change | None
    values: Keep | None
    stored: Callable[[str], Tensor]
    """The tensor of the whole model of this name: some are changed by what is in others."""
    eps: Eps = "matched"
    _pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Matrices that meet in fewer channels: both are of one decomposition."""

    @property
    def narrow(self) -> MixerShape:
        width = self.keys.width if self.keys else self.shape.width
        value_width = self.values.width if self.values else self.shape.value_width
        return replace(self.shape, width=width, value_width=value_width)

    @cached_property
    def _tensors(self) -> dict[str, tuple[int, list[ChannelTensor]]]:
        return self.kind.channel_tensors(self.shape)

    @cached_property
    def _mixers(self) -> tuple[str, ...]:
        """How the names in them begin."""
        return tuple(self.kind.name(layer, "") for layer in self.shape.layers)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if not name.startswith(self._mixers):
            return tensor
        if self.values:
            mixer = next(mixer for mixer in self._mixers if name.startswith(mixer))
            below = name.removeprefix(mixer)
            if below == self.kind.norm:
                return tensor.new_ones(self.values.width)
            if below == self.kind.o_proj:
                tensor = fold(tensor, self.stored(mixer + self.kind.norm))
                if self.eps == "matched":
                    tensor *= math.sqrt(self.shape.value_width / self.values.width)
            for pair in self.kind.bottlenecks:
                if below in pair and self.values.width < self.shape.value_width:
                    return self._narrower(mixer, pair)[pair.index(below)]
        return self._changed(name, tensor)

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        """With its channels changed."""
        index, parts = self._tensors.get(name, (0, []))
        if not any(self._change(part) for part in parts):
            return tensor
        axis = parts[0].axis
        rows = tensor.movedim(axis, 0)
        size = sum(part.places(self.narrow).size for part in parts)
        result = rows.new_empty(size, *rows.shape[1:])
        for part in parts:
            change = self._change(part)
            for old, new in zip(part.places(self.shape), part.places(self.narrow), strict=True):
                result[new] = change(index, part.role, rows[old]) if change else rows[old]
        return result.movedim(0, axis).contiguous()

    def _change(self, part: ChannelTensor) -> Change | None:
        return self.keys if part.channels == "key" else self.values

    def _narrower(self, mixer: str, pair: tuple[str, str]) -> tuple[Tensor, Tensor]:
        """Two matrices that meet in fewer channels: the best ones, by their product."""
        if mixer + pair[0] not in self._pairs:
            names = [mixer + part for part in pair]
            first, second = (self._changed(name, self.stored(name)) for name in names)
            self._pairs[names[0]] = truncate(first, second, self.narrow.value_width)
        return self._pairs[mixer + pair[0]]


def fold(o_proj: Tensor, weight: Tensor) -> Tensor:
    """The output projection (hidden, value heads x d_v) times the weight (d_v) of the norm in front
    of it."""
    columns = o_proj.double().unflatten(1, (-1, len(weight))) * weight.double()
    return columns.flatten(1)


def truncate(first: Tensor, second: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (rank, inputs) and (outputs, rank) of the nearest matrix of that rank to the product
    `second` @ `first`."""
    Q, R = torch.linalg.qr(second.double())  # the product is Q (R S^T) P^T
    P, S = torch.linalg.qr(first.double().mT)
    U, sigma, Vh = torch.linalg.svd(R @ S.mT, full_matrices=False)
    root = sigma[:rank].sqrt()
    factors = Q @ U[:, :rank] * root, P @ Vh[:rank].mT * root
    # Zeros where the product has a lower rank than that.
    outer, inner = (F.pad(factor, (0, rank - len(root))) for factor in factors)
    return inner.mT.contiguous(), outer


def check_channels(
    headers: Mapping[str, Tensor], kind: Architecture, shape: MixerShape, *, values: bool = False
) -> None:
    """An error unless the tensors, of which only names and shapes are looked at, have the channels
    that the config says, and with `values` the parts without which values cannot be cut."""
    required: list[tuple[str, ChannelTensor | str]] = [("key", kind.q_proj), ("key", kind.k_proj)]
    if values:
        required += [("value", part) for part in (kind.v_proj, kind.o_proj, kind.norm)]
    for channels, part in required:
        for name in (kind.name(layer, part) for layer in shape.layers):
            if name not in headers:
                raise InputError(
                    f"the model has no {name}, so its {channels} channels cannot be sliced"
                )
    for name, (_, parts) in kind.channel_tensors(shape).items():
        if name not in headers:
            continue
        size = headers[name].shape[parts[0].axis]
        if size != sum(part.places(shape).size for part in parts):
            sides = dict.fromkeys(part.channels for part in parts)
            heads = ["{} heads of {}".format(*shape.size(side)) for side in sides]
            raise InputError(
                f"{name} has {size} {' and '.join(sides)} channels, but the config says "
                f"{' and '.join(heads)}: {kind.repair or OTHER_WIDTHS}"
            )
    if values:
        check_norms(headers, kind, shape)


def check_norms(headers: Mapping[str, Tensor], kind: Architecture, shape: MixerShape) -> None:
    """An error unless the weight of each norm in front of an output projection can be folded."""
    for layer in shape.layers:
        weight = kind.name(layer, kind.norm)
        norm = weight.removesuffix("weight")
        others = sorted(name for name in headers if name.startswith(norm) and name != weight)
        if others:
            raise InputError(
                f"the model has {others[0]}: values are cut only where the output projection is "
                "linear in what its norm puts out, a weight for each channel of a head"
            )
        if list(headers[weight].shape) != [shape.value_width]:
            raise InputError(
                f"{weight} is {list(headers[weight].shape)}, expected [{shape.value_width}]: "
                "values are cut only where one norm serves every head alike"
            )


def check_sliceable(checkpoint: Checkpoint, *, values: bool = False) -> None:
    """An error if the tensors of a folder contradict its config, or if values are to be cut and
    cannot be; none of them is read."""
    kind = checkpoint.architecture
    headers = with_current_names(checkpoint.headers(), kind)
    check_sizes(checkpoint, headers)
    check_channels(headers, kind, checkpoint.shape, values=values)


def check_sizes(checkpoint: Checkpoint, headers: Mapping[str, Tensor]) -> None:
    """An error if there are other layers or embeddings than the config says, or quantised weights
    that it does not speak of. Loaders would drop or refuse them, after the work."""
    kind, config = checkpoint.architecture, checkpoint.text_config
    prefix, _ = kind.mixer.split("{layer}.")
    layers = {
        name.removeprefix(prefix).split(".")[0] for name in headers if name.startswith(prefix)
    }
    if len(layers) != config["num_hidden_layers"]:
        raise InputError(
            f"{checkpoint.folder}: its config says {config['num_hidden_layers']} layers, and its "
            f"files hold {len(layers)}"
        )
    expected = [config["vocab_size"], config["hidden_size"]]
    for name in headers:
        embeds = name.endswith(EMBEDDINGS) and not name.startswith(kind.passthrough)
        if embeds and list(headers[name].shape) != expected:
            raise InputError(
                f"{checkpoint.folder}: {name} is {list(headers[name].shape)}, and its config says "
                f"{expected} (vocab_size, hidden_size)"
            )
    for name in kind.channel_tensors(checkpoint.shape):
        if name in headers and headers[name].dtype not in DTYPES:
            dtype = str(headers[name].dtype).removeprefix("torch.")
            raise InputError(
                f"{checkpoint.folder}: {name} is {dtype}: quantised weights cannot be sliced; cut "
                "the model before quantisation"
            )


def check_widths(checkpoint: Checkpoint, width: int, value_width: int | None) -> dict[str, Any]:
    """The config of the model with these widths, or an error if it cannot have them."""
    for size, name in ((width, "key"), (value_width, "value")):
        if size is not None and not size >= 1:
            raise InputError(f"a width of {size} leaves no {name} channel")
    kind = checkpoint.architecture
    values = checkpoint.shape.value_width if value_width is None else value_width
    if not can_express(checkpoint, width, values):
        raise InputError(
            f"{checkpoint.folder}: the config of a {kind.model_type} cannot express heads of "
            f"{width} key and {values} value channels"
        )
    return kind.resized(checkpoint.config, width, value_width)


def can_express(checkpoint: Checkpoint, width: int, value_width: int) -> bool:
    """Whether a config with these widths says what it was to say."""
    kind = checkpoint.architecture
    config = kind.resized(checkpoint.config, width, value_width)
    return kind.shape(config) == replace(checkpoint.shape, width=width, value_width=value_width)


def possible_value_widths(checkpoint: Checkpoint, width: int) -> list[int]:
    """How many value channels a head can keep beside so many key channels."""
    values = range(1, checkpoint.shape.value_width + 1)
    return [value_width for value_width in values if can_express(checkpoint, width, value_width)]


def change_channels(
    tensors: Iterable[tuple[str, Tensor]],
    kind: Architecture,
    shape: MixerShape,
    keys: Change | None,
    values: Keep | None = None,
) -> dict[str, Tensor]:
    """All tensors of a model, those over channels changed."""
    whole = dict(tensors)
    check_channels(whole, kind, shape, values=values is not None)
    slicer = Slicer(kind, shape, keys, values, whole.__getitem__)
    return {name: slicer(name, tensor).to(tensor.dtype) for name, tensor in whole.items()}


def no_eps_in_config(kind: Architecture) -> str:
    return (
        f"the eps of {kind.model_type}'s output norm stands in the library's code, so the cut "
        "model differs from the unpruned one with those channels set to zero"
    )


def sliced_bytes(
    checkpoint: Checkpoint, width: int, dtype: torch.dtype | None, value_width: int | None = None
) -> int:
    """What the weights of the smaller model will take on a disk."""
    kind, shape = checkpoint.architecture, checkpoint.shape
    headers = with_current_names(checkpoint.headers(), kind)
    values = value_width and cut_back(shape, value_width, "value")
    keys = cut_back(shape, width)
    slicer = Slicer(kind, shape, keys, values or None, headers.__getitem__)
    # Headers have shapes and no numbers, and so has what becomes of them.
    return sum(
        slicer(name, header).numel() * sliced_dtype(name, header, kind, dtype).itemsize
        for name, header in headers.items()
    )


def sliced_dtype(
    name: str, tensor: Tensor, kind: Architecture, dtype: torch.dtype | None
) -> torch.dtype:
    """What a tensor becomes in a model whose weights are to be `dtype`: what is not the model's own
    is left as it is."""
    own = tensor.is_floating_point() and not name.startswith(kind.passthrough)
    return dtype if dtype and own else tensor.dtype


def slice_model(
    checkpoint: Checkpoint,
    keys: Change | None,
    out: Path | str,
    *,
    values: Keep | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    eps: Eps = "matched",
    card: str | None = None,
    force: bool = False,
) -> None:
    """Write the model with its key channels changed, and its value channels, to a folder that its
    stock library loads. With its eps matched it computes what the whole model does with the cut
    channels set to zero; `kept` leaves eps and the scale of the output projection as they were.

    Files are the model's own, one of them at a time in memory. Tensors that are not the model's
    (`Architecture.passthrough`) are copied as they are.
    """
    kind, shape = checkpoint.architecture, checkpoint.shape
    width = keys.width if keys else shape.width
    config = check_widths(checkpoint, width, values.width if values else None)
    check_sliceable(checkpoint, values=values is not None)
    if dtype is not None:
        for part in (config, text_config(config)):
            part["dtype"] = str(dtype).removeprefix("torch.")
            part.pop("torch_dtype", None)  # what older transformers called it

    def stored(name: str) -> Tensor:
        return checkpoint.tensor(checkpoint.stored[name])

    slicer = Slicer(kind, shape, keys, values, stored, eps)
    if eps == "matched":
        config = kind.scaled_eps(config, eps_factor(shape, slicer.narrow))
        if kind.eps_key is None:
            logger.warning("WARNING: %s", no_eps_in_config(kind))

    def new_tensor(name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype in DTYPES and not tensor.isfinite().all():
            raise InputError(f"{checkpoint.folder}: {name} has NaN or infinity among its numbers")
        return slicer(name, tensor).to(sliced_dtype(name, tensor, kind, dtype))

    with atomic_write(out, force=force, folder=True) as aside:
        rewrite(checkpoint, aside, new_tensor, config)
        if card is not None:
            (aside / "README.md").write_text(card)
