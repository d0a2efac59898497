"""Slicing: fewer channels of keys, of values, or of both make a smaller, ordinary model.

All of it works on tensors by name and on config.json: no model class is needed.

Between the values and the output projection is a norm over the channels of a head, whose weight all
heads share. Heads may keep different channels, so the weight w is first folded into the projection,

    W_o (w * x) = (W_o diag(w, w, ...)) x

a gate included, which multiplies x channel by channel. That is exact.

A cut model computes what the unpruned one does with the cut channels set to zero, if two numbers
follow. The rule scales its output by d_k^-1/2, and the norm takes a mean over d_v channels: of D
key and V value channels k and v are left, and the mean square that the norm divides by is D/k V/v
times the unpruned model's (V/v where the rule does not scale: Mamba2), which matters beside eps. So
eps becomes D/k V/v eps, for all norms of the model where its config has one number for all. And
what the norm puts out is sqrt(v/V) times the unpruned model's, so the output projection is
multiplied by sqrt(V/v).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
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
from statecut.models.architectures.base import (
    Architecture,
    ChannelTensor,
    Role,
    depth,
    text_config,
)
from statecut.models.checkpoint import (
    Checkpoint,
    fill,
    rewrite,
    with_current_names,
    without_parameters,
)
from statecut.models.loaded import Loaded
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
    of most kernels differs, which the output norm takes out but for its eps:
    `Architecture.eps_factor`.
    """

    width: int

    def __call__(self, index: int, role: Role, channels: Tensor) -> Tensor:
        heads, width, *inputs = channels.shape
        return torch.cat([channels, channels.new_zeros(heads, self.width - width, *inputs)], 1)


def cut_back(shape: MixerShape, width: int, channels: Channels = "key") -> Keep:
    """The change that keeps the first `width` channels of every head: the end of a `Pad`."""
    heads, _ = shape.size(channels)
    return Keep(torch.arange(width).expand(len(shape.layers), heads, width))


def narrowed(shape: MixerShape, keys: Change | None, values: Keep | None) -> MixerShape:
    """The shape of a model with these channels."""
    width = keys.width if keys else shape.width
    return replace(shape, width=width, value_width=values.width if values else shape.value_width)


@dataclass(frozen=True)
class Slicer:
    """What becomes of each tensor of a model, in its own type or, where it is computed, in float64.
    Without a change of values nothing is folded."""

    kind: Architecture
    shape: MixerShape
    keys: Change | None
    values: Keep | None
    stored: Callable[[str], Tensor]
    """The tensor of the unpruned model of this name: some are changed by what is in others."""
    eps: Eps = "matched"
    _pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Matrices that meet in fewer channels: both are of one decomposition."""

    @property
    def narrow(self) -> MixerShape:
        return narrowed(self.shape, self.keys, self.values)

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
                return tensor.new_ones(len(tensor) // self.shape.value_width * self.values.width)
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
        return {"key": self.keys, "value": self.values, None: None}[part.channels]

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


def check_sliceable(checkpoint: Checkpoint | Loaded, *, values: bool = False) -> None:
    """An error if the tensors of a folder contradict its config, or if values are to be cut and
    cannot be. No numbers are read; loaders would drop or refuse such tensors, after the work."""
    if problem := next(_contradictions(checkpoint, values), None):
        raise InputError(f"{checkpoint.place}: {problem}")


def _contradictions(checkpoint: Checkpoint | Loaded, values: bool) -> Iterator[str]:
    kind, shape, config = checkpoint.architecture, checkpoint.shape, checkpoint.text_config
    headers = {
        name: header
        for name, header in with_current_names(checkpoint.headers(), kind).items()
        if not name.startswith(checkpoint.passthrough_prefixes)
    }
    names = [name for name in headers if name.startswith(kind.prefix)]
    layers = {name.removeprefix(kind.prefix).split(".")[0] for name in names}
    if len(layers) != (count := depth(config)):
        yield f"its config says {count} layers, and its files hold {len(layers)}"
    required = (kind.q_proj, kind.k_proj)
    value_tensors = (kind.v_proj, kind.o_proj, kind.norm) if values else ()
    for tensor in (*required, *value_tensors):
        for name in (kind.name(layer, tensor) for layer in shape.layers):
            if name not in headers:
                yield f"the model has no {name}, so its channels cannot be sliced"
    for name, (_, parts) in kind.channel_tensors(shape).items():
        if name not in headers:
            continue
        if (dtype := headers[name].dtype) not in DTYPES:
            yield f"{name} is {dtype}: quantised weights cannot be sliced; cut before quantisation"
        size = headers[name].shape[parts[0].axis]
        if size != sum(part.places(shape).size for part in parts):
            sides = dict.fromkeys(part.channels for part in parts if part.channels)
            heads = ["{} heads of {}".format(*shape.size(side)) for side in sides]
            yield (
                f"{name} has {size} {' and '.join(sides)} channels, but the config says "
                f"{' and '.join(heads)}: {kind.repair or OTHER_WIDTHS}"
            )
    norms = [kind.name(layer, kind.norm) for layer in shape.layers] if values else []
    norm_heads = shape.value_heads if kind.own_norms else 1
    sizes = {norm: [norm_heads * shape.value_width] for norm in norms} | {
        name: [config["vocab_size"], config["hidden_size"]]
        for name in headers
        if name.endswith(EMBEDDINGS)
    }
    for name, expected in sizes.items():
        if (found := list(headers[name].shape)) != expected:
            yield f"{name} is {found}, and its config says {expected}"
    for bias in (norm.removesuffix("weight") + "bias" for norm in norms):
        if bias in headers:
            yield f"{bias}: values are cut only where the norm of the outputs has no bias"


def slice_in_memory(
    model: Any, keys: Change | None, values: Keep | None = None, *, eps: Eps = "matched"
) -> Any:
    """A model of its own, on the same device."""
    source = Loaded(model)
    check_sliceable(source, values=values is not None)
    width = keys.width if keys else source.shape.width
    config = source.resized(width, values.width if values else None)
    kind, unpruned = source.architecture, model.state_dict()
    slicer = Slicer(kind, source.shape, keys, values, unpruned.__getitem__, eps)
    if eps == "matched":
        config = kind.scaled_eps(config, kind.eps_factor(source.shape, slicer.narrow))
    sliced = without_parameters(type(model.config).from_dict(config), model.device)
    # Copied, also where nothing is cut: a refit changes weights in place.
    tensors = {n: slicer(n, tensor).to(tensor.dtype, copy=True) for n, tensor in unpruned.items()}
    fill(sliced, tensors, source.place)
    sliced.tie_weights()
    return sliced.eval()


def sliced_dtype(
    name: str, tensor: Tensor, passthrough: tuple[str, ...], dtype: torch.dtype | None
) -> torch.dtype:
    """What a tensor becomes in a model whose weights are to be `dtype`: what is not the model's own
    is left as it is."""
    own = tensor.is_floating_point() and not name.startswith(passthrough)
    return dtype if dtype and own else tensor.dtype


def slice_model(
    checkpoint: Checkpoint,
    keys: Change | None,
    out: Path | str,
    *,
    values: Keep | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    eps: Eps = "matched",
    files: Mapping[str, str] | None = None,
    force: bool = False,
    links: bool = False,
) -> None:
    """Write the model with its key channels changed, and its value channels, to a folder that its
    stock library loads. With its eps matched it computes what the unpruned one does with the cut
    channels set to zero; `kept` leaves eps and the scale of the output projection as they were.

    Files are the model's own, one of them at a time in memory. Tensors that are not the model's
    (`Architecture.passthrough`) are copied as they are.
    """
    kind, shape = checkpoint.architecture, checkpoint.shape
    width = keys.width if keys else shape.width
    config = checkpoint.resized(width, values.width if values else None)
    check_sliceable(checkpoint, values=values is not None)
    if dtype is not None:
        for part in (config, text_config(config)):
            part["dtype"] = str(dtype).removeprefix("torch.")
            part.pop("torch_dtype", None)  # what older transformers called it

    def stored(name: str) -> Tensor:
        return checkpoint.tensor(checkpoint.stored[name])

    slicer = Slicer(kind, shape, keys, values, stored, eps)
    prefixes = checkpoint.passthrough_prefixes
    if eps == "matched":
        config = kind.scaled_eps(config, kind.eps_factor(shape, slicer.narrow))
        if kind.eps_key is None:
            logger.warning(
                "WARNING: the eps of %s's output norm stands in the library's code, so the cut "
                "model differs from the unpruned one with those channels set to zero",
                kind.model_type,
            )

    def new_tensor(name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype in DTYPES and not tensor.isfinite().all():
            raise InputError(f"{checkpoint.folder}: {name} has NaN or infinity among its numbers")
        return slicer(name, tensor).to(sliced_dtype(name, tensor, prefixes, dtype))

    with atomic_write(out, force=force, folder=True) as aside:
        rewrite(checkpoint, aside, new_tensor, config, links=links)
        for name, text in (files or {}).items():
            (aside / name).write_text(text)
