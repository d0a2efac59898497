"""What an adapter says of its architecture, and the arithmetic that several of them share.

A checkpoint is its config.json (a dict) and its tensors by name. Nothing here, and nothing that an
adapter does when it is imported, needs torch or a model class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from statecut.errors import InputError
from statecut.models.shapes import Cache, Channels, Kernel, MixerShape, SoftmaxLayers

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Config = dict[str, Any]
Role = Literal["projection", "filter", "bias"]
DEFAULT_EPS = 1e-6  # of norms, in most libraries, where a config says none


def by_head(shape: MixerShape, channels: Channels | None) -> np.ndarray:
    """(heads, width): the places of head 0, then those of head 1, and so on."""
    import numpy as np

    heads, width = shape.size(channels)
    return np.arange(heads * width).reshape(heads, width)


@dataclass(frozen=True)
class ChannelTensor:
    """A tensor with an axis over channels; `layout` gives the place of each on it.

    A tensor that holds several kinds of them (queries and keys, values and gates) is as many of
    these, of one name and axis, which together have all places of the axis. One with several
    entries for each channel has a layout (entries, heads, width).
    """

    name: str  # below the layer's mixer
    role: Role
    channels: Channels | None = "key"  # None: one number for each value head, which stays
    axis: int = 0
    layout: Callable[[MixerShape, Any], np.ndarray] = by_head

    def places(self, shape: MixerShape) -> np.ndarray:
        """(entries, heads, width)."""
        return self.layout(shape, self.channels).reshape(-1, *shape.size(self.channels))


@dataclass(frozen=True)
class DeltaRule:
    """A family of kernels, and a layer that calls it."""

    name: Kernel
    chunked: str  # of fla.ops
    layer: Callable[..., Any]
    """One layer of these hidden_size, num_heads, width, head_v_dim, num_v_heads and use_gate."""
    heads: int  # in published models, as is the width of their values
    value_width: int
    gated: bool = False  # takes g, the logarithm of a decay, too,
    per_channel: bool = False  # for each key channel and not for each head
    grouped: bool = False  # a key head may serve several value heads


@dataclass(frozen=True)
class Call:
    """Where the layers of a model look up their delta rule, and how they call it."""

    module: str
    functions: tuple[str, ...]
    by_position: tuple[str, ...] = ()  # the names of arguments that come without one
    scaled: bool = True  # its outputs are multiplied by d_k^-1/2
    options: Mapping[str, Any] = field(default_factory=dict)  # that change the kernels' code


def fla_softmax(config: Config, shape: MixerShape) -> tuple[SoftmaxLayers, ...]:
    """Of a hybrid of flash-linear-attention, kind by kind."""
    return tuple(
        SoftmaxLayers(
            layers=len(kind["layers"]),
            heads=kind.get("num_kv_heads") or need(kind, "num_heads"),
            width=need(config, "hidden_size") // need(kind, "num_heads"),
            window=kind.get("window_size"),
        )
        for kind in softmax_kinds(config)
        if kind.get("layers")
    )


def fla_taps(config: Config) -> int:
    return config.get("conv_size", 4) if config.get("use_short_conv", True) else 0


@dataclass(frozen=True)
class Architecture:
    """docs/reference/architectures.md has a line for each field."""

    model_type: str
    rule: DeltaRule | None  # that preflight and benchmarks examine
    call: Call
    shape: Callable[[Config], MixerShape]
    resized: Callable[..., Config]
    """(config, width, value_width=None): the config with another d_k, and another d_v if that is
    given. Slicing is refused where `shape` does not read both back."""
    cpu_fallbacks: Callable[[], dict[str, Callable[..., Any]]]
    """What runs on a CPU in place of functions of `call.module`, by their names."""
    softmax: Callable[[Config, MixerShape], tuple[SoftmaxLayers, ...]] = fla_softmax
    taps: Callable[[Config], int] = fla_taps  # of a convolution filter
    options: tuple[str, ...] = ("use_gate",)  # keys of the config that pruning leaves alone
    register: Callable[[], object] = lambda: None  # with AutoModel, where `import fla` does not
    library: str = "fla.models"  # what a user imports for that
    since: str | None = "5.17"  # the first transformers that has its class; None if none has
    float32: bool = True  # whether its kernel takes it

    # Files may hold more than the text model, which the model in memory is, and hold it otherwise.
    text_model: str = "model."  # how the names begin that the model in memory begins with `model.`
    passthrough: tuple[str, ...] = ()  # how the names of all else begin: it is copied as it is
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names in files, as patterns, and what the model in memory has for them."""
    joined: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
    """Tensors as files have them to those of the model in memory, which may be several in one."""

    mixer: str = "model.layers.{layer}.attn."
    q_proj: ChannelTensor = ChannelTensor("q_proj.weight", "projection")
    k_proj: ChannelTensor = ChannelTensor("k_proj.weight", "projection")
    # Optional: a model may have no bias, or no convolution at all.
    filters: tuple[ChannelTensor, ...] = (
        ChannelTensor("q_conv1d.weight", "filter"),
        ChannelTensor("k_conv1d.weight", "filter"),
        ChannelTensor("q_conv1d.bias", "bias"),
        ChannelTensor("k_conv1d.bias", "bias"),
    )
    v_proj: ChannelTensor = ChannelTensor("v_proj.weight", "projection", "value")
    square: bool = False  # keys and values have one width: d_k = d_v
    # Optional, too: filters, and what makes the gate.
    value_tensors: tuple[ChannelTensor, ...] = (
        ChannelTensor("v_conv1d.weight", "filter", "value"),
        ChannelTensor("v_conv1d.bias", "bias", "value"),
        ChannelTensor("g_proj.weight", "projection", "value"),
    )
    bottlenecks: tuple[tuple[str, str], ...] = ()
    """Pairs of matrices, applied one after the other, that meet in d_v channels of no head."""
    repair: str = ""  # what to do about files known to contradict their config
    unused: tuple[str, ...] = ()  # tensors of the mixer that older versions saved and none reads
    o_proj: str = "o_proj.weight"  # what follows the rule
    layer_output: Callable[[Any], Any] = lambda hidden: (hidden, None, None, None)
    """What a layer returns for these hidden states, without a cache."""
    streams: tuple[str, str] | None = None
    """The modules of a layer that mix several residual streams into what enters its mixer, and into
    what enters its MLP,"""
    shares: int = 0  # and which of their outputs says how much of the result each stream gets
    norm_eps: str = "o_norm.eps"  # of the norm between the two
    eps_key: str | None = "norm_eps"  # what the config calls it; None where no config says it
    default_eps: float = DEFAULT_EPS  # where it says none
    own_norms: bool = False  # whether each value head has a weight of that norm, (d_v)
    # What recovery trains: with adapters, and as they are.
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    convolutions: tuple[str, ...] = ("q_conv1d", "k_conv1d", "v_conv1d")

    def cache(self, config: Config) -> Cache:
        shape = self.shape(config)
        return Cache(shape, self.taps(config), self.softmax(config, shape))

    def name(self, layer: int, tensor: ChannelTensor | str) -> str:
        """Of a tensor, or of one that is called this below the layer's mixer."""
        below = tensor if isinstance(tensor, str) else tensor.name
        return self.mixer.format(layer=layer) + below

    @property
    def prefix(self) -> str:
        """What the names of all tensors of layers begin with; the layer's number follows."""
        return self.mixer.partition("{layer}")[0]

    @property
    def norm(self) -> str:
        """The weight of the norm in front of `o_proj`: (d_v), or that for each head."""
        return self.norm_eps.rpartition(".")[0] + ".weight"

    def eps(self, config: Config) -> float | None:
        """Of the output norm, where the config says it."""
        return text_config(config).get(self.eps_key, self.default_eps) if self.eps_key else None

    def eps_factor(self, before: MixerShape, after: MixerShape) -> float:
        """What the eps of the output norm is multiplied by, so that with other widths, and zeros
        for the channels that only one of them has, the norm sees the same proportions."""
        old, new = (before.width, after.width) if self.call.scaled else (1, 1)
        return old * before.value_width / (new * after.value_width)

    def scaled_eps(self, config: Config, factor: float) -> Config:
        """The config with that eps times a factor; as it is where no config says it."""
        eps = self.eps(config)
        if self.eps_key is None or eps is None:
            return config
        return with_text(config, {self.eps_key: eps * factor})

    def missing(self) -> str:
        """Why no model of it can be made here; nothing if one can."""
        if self.since is None:
            return f"transformers has no class for {self.model_type}"
        if _numbers(installed("transformers")) < _numbers(self.since):
            return (
                f"{self.model_type} needs transformers {self.since} or newer, and "
                f"{installed('transformers')} is installed"
            )
        return ""

    def channel_tensors(self, shape: MixerShape) -> dict[str, tuple[int, list[ChannelTensor]]]:
        """By the names of tensors: the layer, counting those with a delta rule, and what of it
        runs over channels."""
        o_proj = ChannelTensor(self.o_proj, "projection", "value", axis=1)
        keys = (self.q_proj, self.k_proj, *self.filters)
        values = (self.v_proj, *self.value_tensors, o_proj)
        tensors: dict[str, tuple[int, list[ChannelTensor]]] = {}
        for index, layer in enumerate(shape.layers):
            for tensor in (*keys, *values):
                tensors.setdefault(self.name(layer, tensor), (index, []))[1].append(tensor)
        return tensors


@cache  # metadata is parsed like mail, which takes milliseconds
def installed(package: str) -> str:
    return metadata.version(package)


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:2]]


@dataclass(frozen=True)
class Size:
    """A number or choice that the configuration of a run gives for a model."""

    name: str
    type: Any  # int and float have to be above 0
    description: str
    default: Any = ...  # it has to be given


@dataclass(frozen=True)
class Section:
    """A model of this architecture in the configuration of a run."""

    name: str  # of its type, in the schema
    architecture: str  # what the configuration calls it
    model_type: str
    about: str
    sizes: tuple[Size, ...]  # beside those that every model has
    mixer_parameters: Callable[[Config, MixerShape], int]
    softmax_parameters: Callable[[Config], int] = lambda config: 0
    """How many parameters a delta rule and a softmax attention have, from what `config` gives."""
    config: Callable[[Config], Config] = lambda sizes: sizes
    """What the model's config class takes, from all sizes and the model_type."""


def text_config(config: Config) -> Config:
    """The part of a config that is the text model's: all of it, but in multimodal models."""
    return config.get("text_config", config)


def with_text(config: Config, changes: Config) -> Config:
    """A config whose text model has other values."""
    text = {**text_config(config), **changes}
    return {**config, "text_config": text} if "text_config" in config else text


def need(config: Config, key: str) -> int:
    """A size that a config has to have."""
    if key not in config:
        of = f" of a {config['model_type']} model" if "model_type" in config else ""
        raise InputError(f"config.json{of}: {key!r} is missing")
    return whole(config[key], key)


def softmax_kinds(config: Config) -> list[Config]:
    """The `attn` of a config of flash-linear-attention: one kind of softmax layers, or a list."""
    attention = config.get("attn") or []
    return attention if isinstance(attention, list) else [attention]


def depth(config: Config) -> int:
    """How many layers a text model has. nemotron_h may say it by their kinds alone."""
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


def mixer_layers(config: Config) -> tuple[int, ...]:
    softmax = {layer for kind in softmax_kinds(config) for layer in kind.get("layers", ())}
    return tuple(i for i in range(need(config, "num_hidden_layers")) if i not in softmax)


def whole(value: float, what: str) -> int:
    number = isinstance(value, int | float)
    if not number or round(value) < 1 or not math.isclose(value, round(value), rel_tol=1e-5):
        raise InputError(f"{what} = {value!r}: must be a whole number, 1 or more")
    return round(value)


def factor(size: int, of: int) -> float:
    """size / of, so that int(of * factor) is the size: for some the quotient falls one short."""
    quotient = size / of
    while int(of * quotient) < size:
        quotient = math.nextafter(quotient, math.inf)
    return quotient
