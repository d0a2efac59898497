"""The sizes of a model that decide what it keeps per request, and what kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kernel = Literal["delta_net", "gated_deltanet", "kda"]
WIDEST = 256
"""Key channels per head: the kernels take no wider keys."""
Channels = Literal["key", "value"]
"""Whose channels: those of keys are those of queries too."""


@dataclass(frozen=True, order=True)
class Shape:
    """What the kernels of a delta rule are compiled for: each number changes their code."""

    kernel: Kernel
    heads: int  # of keys and queries
    width: int  # d_k
    value_heads: int
    value_width: int  # d_v

    @property
    def name(self) -> str:
        """As in the names of files."""
        return f"{self.kernel}-{self.heads}x{self.width}-{self.value_heads}x{self.value_width}"


@dataclass(frozen=True)
class MixerShape:
    """The mixer of a model, the same in all of these layers."""

    layers: tuple[int, ...]  # those with a delta rule; a hybrid has softmax layers between them
    heads: int
    width: int  # d_k
    value_heads: int
    value_width: int  # d_v

    def size(self, channels: Channels | None) -> tuple[int, int]:
        """Heads, and channels of each; without a kind of channels, one for each value head."""
        if channels == "key":
            return self.heads, self.width
        return self.value_heads, self.value_width if channels else 1

    def narrower_than(self, other: MixerShape) -> bool:
        """Whether it has fewer channels of keys or of values, and more of neither."""
        fewer = other.width - self.width, other.value_width - self.value_width
        return min(fewer) >= 0 and any(fewer)

    def state_bytes(self, bytes_per_number: int = 4) -> int:
        """The recurrent state of one request; the kernels hold it in float32."""
        per_layer = self.value_heads * self.width * self.value_width
        return len(self.layers) * per_layer * bytes_per_number


@dataclass(frozen=True)
class SoftmaxLayers:
    """Layers with softmax attention, all of one shape, by what they keep per request."""

    layers: int
    heads: int  # of keys and of values
    width: int  # of a head
    window: int | None = None  # how many tokens back they look, if not to the first
    beside: int = 0  # numbers of a token beside its keys and values: of an indexer

    def cache_bytes(self, tokens: int) -> int:
        """What is kept of so many tokens, in 16 bits."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return self.layers * (2 * self.heads * self.width + self.beside) * kept * 2


@dataclass(frozen=True)
class Cache:
    """What a model keeps per request between two tokens: the recurrent state in float32, the rest
    in 16 bits, as most engines have it."""

    shape: MixerShape
    taps: int  # of a convolution filter: 0 where there is none
    softmax: tuple[SoftmaxLayers, ...] = ()

    def filter_bytes(self, drafts: int = 0) -> int:
        """The last inputs of the convolutions of queries, keys and values, and those of drafts."""
        shape = self.shape
        channels = 2 * shape.heads * shape.width + shape.value_heads * shape.value_width
        return len(shape.layers) * channels * (self.taps - 1 + drafts if self.taps else 0) * 2

    def state_bytes(self) -> int:
        """All that does not grow with the sequence."""
        return self.shape.state_bytes() + self.filter_bytes()

    def softmax_bytes(self, tokens: int) -> int:
        return sum(kind.cache_bytes(tokens) for kind in self.softmax)

    def total_bytes(self, tokens: int) -> int:
        return self.state_bytes() + self.softmax_bytes(tokens)

    def resized(self, width: int, value_width: int | None = None) -> Cache:
        """With another d_k, and another d_v if that is given."""
        values = value_width or self.shape.value_width
        return replace(self, shape=replace(self.shape, width=width, value_width=values))
