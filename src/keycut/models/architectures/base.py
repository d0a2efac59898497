"""What an adapter says of its architecture, and the arithmetic that several of them share.

A checkpoint is its config.json (a dict) and its tensors by name. Nothing here, and nothing that an
adapter does when it is imported, needs torch or a model class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from keycut.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from keycut.config.section import Kernel

Config = dict[str, Any]


@dataclass(frozen=True)
class MixerShape:
    """The mixer of a model, in numbers. All layers have the same."""

    layers: tuple[int, ...]  # those with a delta rule; a hybrid has softmax layers between them
    heads: int
    width: int  # d_k
    value_heads: int
    value_width: int  # d_v

    def state_bytes(self, bytes_per_number: int = 4) -> int:
        """The recurrent state of one sequence; the kernels hold it in float32."""
        per_layer = self.value_heads * self.width * self.value_width
        return len(self.layers) * per_layer * bytes_per_number


@dataclass(frozen=True)
class SoftmaxLayers:
    """Layers with softmax attention, all of one shape, by what they keep of a sequence."""

    layers: int
    heads: int  # of keys and of values
    width: int  # of a head
    window: int | None = None  # how many tokens back they look, if not to the first

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of a sequence so long, in 16 bits."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return 2 * self.layers * self.heads * self.width * kept * 2


@dataclass(frozen=True)
class Cache:
    """What a model keeps of one sequence between two tokens.

    The recurrent state is in float32, the rest in 16 bits, as most engines have it.
    """

    shape: MixerShape
    taps: int  # of a convolution filter: 0 where there is none
    softmax: tuple[SoftmaxLayers, ...] = ()

    def filter_bytes(self) -> int:
        """The last inputs of the convolutions of queries, keys and values."""
        shape = self.shape
        channels = 2 * shape.heads * shape.width + shape.value_heads * shape.value_width
        return len(shape.layers) * channels * max(self.taps - 1, 0) * 2

    def state_bytes(self) -> int:
        """All that does not grow with the sequence."""
        return self.shape.state_bytes() + self.filter_bytes()

    def softmax_bytes(self, tokens: int) -> int:
        return sum(kind.cache_bytes(tokens) for kind in self.softmax)

    def total_bytes(self, tokens: int) -> int:
        return self.state_bytes() + self.softmax_bytes(tokens)

    def resized(self, width: int) -> Cache:
        """With another d_k."""
        return replace(self, shape=replace(self.shape, width=width))


def by_head(shape: MixerShape) -> np.ndarray:
    """(heads, d_k): the rows of head 0, then those of head 1, and so on."""
    import numpy as np

    return np.arange(shape.heads * shape.width).reshape(shape.heads, shape.width)


Role = Literal["projection", "filter", "bias"]


@dataclass(frozen=True)
class ChannelTensor:
    """A tensor with an axis over the key channels; `layout` gives the place of each on it.

    A tensor that holds the channels of queries and of keys is two of these, of one name. One with
    several entries for each channel has a layout (entries, heads, d_k).
    """

    name: str  # below the layer's mixer
    role: Role
    axis: int = 0
    layout: Callable[[MixerShape], np.ndarray] = by_head
    others: Callable[[MixerShape], int] = lambda shape: 0
    """How many places of the axis belong neither to keys nor to queries."""


@dataclass(frozen=True)
class DeltaRule:
    """A family of kernels, and a layer that calls it."""

    name: Kernel
    chunked: str  # of fla.ops
    layer: Callable[..., Any]
    """One layer of these hidden_size, num_heads, width, head_v_dim, num_v_heads and use_gate."""
    heads: int  # in published models, as is the width of their values
    value_width: int
    gated: bool = False  # takes g, the logarithm of a decay, too
    grouped: bool = False  # a key head may serve several value heads


@dataclass(frozen=True)
class Call:
    """Where the layers of a model look up their delta rule, and how they call it."""

    module: str
    functions: tuple[str, ...]
    by_position: tuple[str, ...] = ()  # the names of arguments that come without one
    repeated: bool = False  # q and k come once for each value head
    options: Mapping[str, Any] = field(default_factory=dict)  # that change the kernels' code

    def heads(self, shape: MixerShape) -> int:
        """Of the q and k that the rule receives."""
        return shape.value_heads if self.repeated else shape.heads


def fla_softmax(config: Config, shape: MixerShape) -> tuple[SoftmaxLayers, ...]:
    """Of a hybrid of flash-linear-attention, kind by kind."""
    kinds = [kind for kind in softmax_kinds(config) if kind.get("layers")]
    if any("num_heads" not in kind for kind in kinds):
        raise InputError(f"config.json of a {config['model_type']} model: attn has no num_heads")
    return tuple(
        SoftmaxLayers(
            layers=len(kind["layers"]),
            heads=kind.get("num_kv_heads") or kind["num_heads"],
            width=need(config, "hidden_size") // kind["num_heads"],
            window=kind.get("window_size"),
        )
        for kind in kinds
    )


def fla_taps(config: Config) -> int:
    return config.get("conv_size", 4) if config.get("use_short_conv", True) else 0


StandIn = tuple[str, str, Callable[..., Any]]
"""Module, name, and what stands there on a CPU."""


@dataclass(frozen=True)
class Architecture:
    model_type: str
    rule: DeltaRule | None  # that preflight and benchmarks examine
    call: Call
    shape: Callable[[Config], MixerShape]
    resized: Callable[[Config, int], Config]
    """The config with another d_k and the same d_v."""
    stand_ins: Callable[[], list[StandIn]]
    softmax: Callable[[Config, MixerShape], tuple[SoftmaxLayers, ...]] = fla_softmax
    taps: Callable[[Config], int] = fla_taps  # of a convolution filter
    options: tuple[str, ...] = ("use_gate",)  # keys of the config that pruning leaves alone
    register: Callable[[], None] = lambda: None
    """Makes AutoModel know it, where `import fla` is not enough."""
    library: str = "fla.models"  # what a user imports for that
    float32: bool = True  # whether its kernel takes it

    # Files may hold more than the text model, which the model in memory is, and hold it otherwise.
    text_model: str = "model."  # how the names begin that the model in memory begins with `model.`
    beyond: tuple[str, ...] = ()  # how the names of all else begin: it is copied as it is
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
    mend: str = ""  # what to do about files known to contradict their config
    unused: tuple[str, ...] = ("D",)  # of the mixer: older versions saved it, none reads it
    o_proj: str = "o_proj.weight"  # what follows the rule
    layer_output: Callable[[Any], Any] = lambda hidden: (hidden, None, None, None)
    """What a layer returns for these hidden states, without a cache."""
    norm_eps: str = "o_norm.eps"  # of the norm between the two
    # What recovery trains: with adapters, and as they are.
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    convolutions: tuple[str, ...] = ("q_conv1d", "k_conv1d", "v_conv1d")

    def cache(self, config: Config) -> Cache:
        shape = self.shape(config)
        return Cache(shape, self.taps(config), self.softmax(config, shape))

    def name(self, layer: int, tensor: ChannelTensor) -> str:
        return self.mixer.format(layer=layer) + tensor.name

    def stored_name(self, name: str) -> str:
        """What files call a tensor of this name in memory."""
        if name.startswith("model.") and not name.startswith(self.beyond):
            return self.text_model + name.removeprefix("model.")
        return name

    def channel_tensors(self, shape: MixerShape) -> dict[str, tuple[int, list[ChannelTensor]]]:
        """By the names of tensors: the layer, counting those with a delta rule, and what of it
        runs over key channels."""
        tensors: dict[str, tuple[int, list[ChannelTensor]]] = {}
        for index, layer in enumerate(shape.layers):
            for key in (self.q_proj, self.k_proj, *self.filters):
                tensors.setdefault(self.name(layer, key), (index, []))[1].append(key)
        return tensors


def text_config(config: Config) -> Config:
    """The part of a config that is the text model's: all of it, but in multimodal models."""
    return config.get("text_config", config)


def need(config: Config, key: str) -> Any:
    if key not in config:
        raise InputError(f"config.json of a {config['model_type']} model: {key!r} is missing")
    return config[key]


def softmax_kinds(config: Config) -> list[Config]:
    """The `attn` of a config of flash-linear-attention: one kind of softmax layers, or a list."""
    attention = config.get("attn") or []
    return attention if isinstance(attention, list) else [attention]


def mixer_layers(config: Config) -> tuple[int, ...]:
    softmax = {layer for kind in softmax_kinds(config) for layer in kind.get("layers", ())}
    return tuple(i for i in range(need(config, "num_hidden_layers")) if i not in softmax)


def whole(value: float, what: str) -> int:
    if not math.isclose(value, round(value), rel_tol=1e-5) or round(value) < 1:
        raise InputError(
            f"{what} = {value:g}: the width of a head must be a whole number, 1 or more"
        )
    return round(value)


def factor(size: int, of: int) -> float:
    """size / of, so that int(of * factor) is the size: for some the quotient falls one short."""
    quotient = size / of
    while int(of * quotient) < size:
        quotient = math.nextafter(quotient, math.inf)
    return quotient
