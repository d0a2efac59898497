"""Where each architecture keeps its key channels: a table, and arithmetic on config.json.

Nothing here knows a model class. A checkpoint is its config.json (a dict) and its tensors by
name; an architecture says which axis of which tensor runs over the key channels, and what a
config looks like when they become fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from keycut.errors import InputError, nearest

Config = dict[str, Any]


@dataclass(frozen=True)
class KeyShape:
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


def by_head(shape: KeyShape) -> np.ndarray:
    """(heads, d_k): the rows of head 0, then those of head 1, and so on."""
    return np.arange(shape.heads * shape.width).reshape(shape.heads, shape.width)


Role = Literal["projection", "filter", "bias"]


@dataclass(frozen=True)
class KeyTensor:
    """A tensor with an axis over the key channels; `layout` gives the place of each on it."""

    name: str  # below the layer's mixer
    role: Role
    axis: int = 0
    layout: Callable[[KeyShape], np.ndarray] = by_head
    alone: bool = True  # nothing but key channels lies on that axis


@dataclass(frozen=True)
class Architecture:
    model_type: str
    shape: Callable[[Config], KeyShape]
    resized: Callable[[Config, int], Config]
    """The config with another d_k and the same d_v."""
    q_proj: KeyTensor = KeyTensor("q_proj.weight", "projection")
    k_proj: KeyTensor = KeyTensor("k_proj.weight", "projection")
    # Optional: a model may have no bias, or no convolution at all.
    filters: tuple[KeyTensor, ...] = (
        KeyTensor("q_conv1d.weight", "filter"),
        KeyTensor("k_conv1d.weight", "filter"),
        KeyTensor("q_conv1d.bias", "bias"),
        KeyTensor("k_conv1d.bias", "bias"),
    )
    mixer: str = "model.layers.{layer}.attn."
    stock: bool = True  # `import fla.models` is enough for AutoModel to know it
    float32: bool = True  # whether its kernel takes it

    def name(self, layer: int, tensor: KeyTensor) -> str:
        return self.mixer.format(layer=layer) + tensor.name


def need(config: Config, key: str) -> Any:
    if key not in config:
        raise InputError(f"config.json of a {config['model_type']} model: {key!r} is missing")
    return config[key]


def _mixer_layers(config: Config) -> tuple[int, ...]:
    attention = config.get("attn") or []  # one kind of softmax layers, or a list of kinds
    kinds = attention if isinstance(attention, list) else [attention]
    softmax = {layer for kind in kinds for layer in kind.get("layers", ())}
    return tuple(i for i in range(need(config, "num_hidden_layers")) if i not in softmax)


def _whole(value: float, what: str) -> int:
    if not math.isclose(value, round(value), rel_tol=1e-5) or round(value) < 1:
        raise InputError(f"{what} is {value}: must be a whole number, 1 or more")
    return round(value)


def _delta_net_shape(config: Config) -> KeyShape:
    hidden, heads = need(config, "hidden_size"), need(config, "num_heads")
    key_dim = hidden * config.get("expand_k", 1.0)
    value_dim = hidden * config.get("expand_v", 1.0)
    said = f"with hidden_size {hidden} and num_heads {heads}"
    return KeyShape(
        layers=_mixer_layers(config),
        heads=heads,
        width=_whole(key_dim / heads, f"the key width of a head {said}"),
        value_heads=heads,
        value_width=_whole(value_dim / heads, f"the value width of a head {said}"),
    )


def _factor(size: int, of: int) -> float:
    """size / of, so that int(of * factor) is the size: for some the quotient falls one short."""
    factor = size / of
    while int(of * factor) < size:
        factor = math.nextafter(factor, math.inf)
    return factor


def _delta_net_resized(config: Config, width: int) -> Config:
    # fla takes int(hidden_size * expand_k) up to 0.5, and rounds since.
    return {**config, "expand_k": _factor(config["num_heads"] * width, config["hidden_size"])}


def _gated_shape(config: Config) -> KeyShape:
    heads, width = need(config, "num_heads"), need(config, "head_dim")
    value_heads = config.get("num_v_heads") or heads
    if value_heads % heads:
        raise InputError(f"num_v_heads {value_heads}: must be a multiple of num_heads {heads}")
    value_width = width * config.get("expand_v", 2.0)
    return KeyShape(
        layers=_mixer_layers(config),
        heads=heads,
        width=_whole(width, "head_dim"),
        value_heads=value_heads,
        value_width=_whole(value_width, f"head_dim {width} times expand_v"),
    )


def _gated_resized(config: Config, width: int) -> Config:
    # fla takes int(head_dim * expand_v).
    expand_v = _factor(_gated_shape(config).value_width, width)
    return {**config, "head_dim": width, "expand_v": expand_v}


ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture("delta_net", _delta_net_shape, _delta_net_resized, float32=False),
        Architecture(
            "delta_net_shared_conv",
            _delta_net_shape,
            _delta_net_resized,
            # A filter of a whole head, or of all of them, has no key channels of its own.
            filters=(),
            stock=False,
            float32=False,
        ),
        Architecture("gated_deltanet", _gated_shape, _gated_resized),
    )
}


def architecture(config: Config) -> Architecture:
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        hint = nearest(str(model_type), ARCHITECTURES)
        raise InputError(f"model_type {model_type!r} is none that Keycut knows{hint}")
    return ARCHITECTURES[model_type]
