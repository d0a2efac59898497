"""Models: their sizes, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from keycut.config.pruning import width
from keycut.config.section import WHICH, Kernel, Name, Section
from keycut.config.sources import FromDisk, FromHub


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


class Pretrained(Section):
    """A model trained by this run."""

    kind: Literal["pretrain"] = WHICH
    recipe: Name = Field(description="one of `recipes`")


class ModelBase(Section):
    label: str = Field(description="name in tables and figures")
    source: Annotated[Pretrained | FromHub | FromDisk, Field(discriminator="kind")] = Field(
        description="where its weights come from"
    )
    tokenizer: Name = Field(description="one of `tokenizers`")
    vocab_size: PositiveInt = Field(32000, description="rows of the embedding")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_hidden_layers: PositiveInt = Field(description="number of layers")
    num_heads: PositiveInt = Field(description="heads of keys and queries")
    conv_size: PositiveInt = Field(4, description="taps of the short convolutions")
    intermediate_size: PositiveInt | None = Field(
        None, description="width of the MLP; 8/3 of hidden_size, up to a multiple of 256, if absent"
    )
    tie_word_embeddings: bool = Field(
        False, description="whether input and output embeddings are one matrix"
    )
    published_as: Name | None = Field(
        None, description="its name in config/published/values.csv, where that is another"
    )

    @property
    def mlp_width(self) -> int:
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-int(self.hidden_size * 4 * 2 / 3) // 256) * 256

    def _fla(self, **sizes: Any) -> dict[str, Any]:
        common = (
            "hidden_size",
            "num_hidden_layers",
            "num_heads",
            "conv_size",
            "vocab_size",
            "tie_word_embeddings",
        )
        return (
            {name: getattr(self, name) for name in common}
            | {"intermediate_size": self.mlp_width}
            | sizes
        )

    def _parameters(self, key_dim: int, value_dim: int, filters: int, rest: int) -> int:
        """All parameters, given the sums over heads and what one mixer has beside projections."""
        mixer = 2 * self.hidden_size * (key_dim + value_dim) + self.conv_size * filters + rest
        layer = mixer + 3 * self.hidden_size * self.mlp_width + 2 * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


class DeltaNetBase(ModelBase):
    kernel: ClassVar[Kernel] = "delta_net"
    expand_k: PositiveFloat = Field(
        1.0, description="keys of all heads together, as a multiple of hidden_size"
    )
    expand_v: PositiveFloat = Field(
        1.0, description="values of all heads together, as a multiple of hidden_size"
    )

    @model_validator(mode="after")
    def _heads_are_whole(self) -> Self:
        for name, factor in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            share = Fraction(str(factor)) * self.hidden_size / self.num_heads
            if share.denominator != 1:
                raise ValueError(
                    f"hidden_size {self.hidden_size} x {name} {factor} / num_heads "
                    f"{self.num_heads} = {float(share):g}: the width of a head must be whole"
                )
        return self

    @property
    def value_heads(self) -> int:
        return self.num_heads

    @property
    def head_k_dim(self) -> int:
        return int(Fraction(str(self.expand_k)) * self.hidden_size / self.num_heads)

    @property
    def head_v_dim(self) -> int:
        return int(Fraction(str(self.expand_v)) * self.hidden_size / self.num_heads)

    def _with_filters(self, filters: int | None = None) -> int:
        keys, values = self.num_heads * self.head_k_dim, self.num_heads * self.head_v_dim
        beta, norm = self.hidden_size * self.num_heads, self.head_v_dim
        return self._parameters(keys, values, filters or 2 * keys + values, beta + norm)


class DeltaNet(DeltaNetBase):
    """DeltaNet, as in flash-linear-attention: head widths follow from hidden_size."""

    architecture: Literal["delta_net"] = WHICH
    conv_sharing: ClassVar[str] = "none"

    @property
    def parameters(self) -> int:
        return self._with_filters()

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        return self._fla(model_type="delta_net", expand_k=self.expand_k, expand_v=self.expand_v)


class SharedDeltaNet(DeltaNetBase):
    """DeltaNet whose channels share convolution filters, in q, k and v each."""

    architecture: Literal["delta_net_shared"] = WHICH
    conv_sharing: Literal["head", "all"] = Field(
        description="one filter per head, or one for all heads and channels"
    )

    @property
    def parameters(self) -> int:
        return self._with_filters(3 * (self.num_heads if self.conv_sharing == "head" else 1))

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        return self._fla(
            model_type="delta_net_shared_conv",
            expand_k=self.expand_k,
            expand_v=self.expand_v,
            conv_sharing=self.conv_sharing,
        )


class GatedDeltaNet(ModelBase):
    """Gated DeltaNet, as in flash-linear-attention: head widths are free."""

    architecture: Literal["gated_deltanet"] = WHICH
    kernel: ClassVar[Kernel] = "gated_deltanet"
    conv_sharing: ClassVar[str] = "none"
    head_dim: PositiveInt = Field(description="width of a head's keys and queries")
    expand_v: PositiveFloat = Field(description="width of a head's values, as a multiple of that")
    num_v_heads: PositiveInt | None = Field(
        None, description="heads of values, a multiple of num_heads; as many if absent"
    )
    use_gate: bool = Field(True, description="whether the output is gated")

    @model_validator(mode="after")
    def _heads_are_whole(self) -> Self:
        share = Fraction(str(self.expand_v)) * self.head_dim
        if share.denominator != 1:
            raise ValueError(
                f"head_dim {self.head_dim} x expand_v {self.expand_v} = {float(share):g}: "
                "the width of a value head must be whole"
            )
        if self.value_heads % self.num_heads:
            raise ValueError(
                f"num_v_heads {self.num_v_heads} must be a multiple of num_heads {self.num_heads}"
            )
        return self

    @property
    def value_heads(self) -> int:
        return self.num_v_heads or self.num_heads

    @property
    def head_k_dim(self) -> int:
        return self.head_dim

    @property
    def head_v_dim(self) -> int:
        return int(Fraction(str(self.expand_v)) * self.head_dim)

    @property
    def parameters(self) -> int:
        keys, values = self.num_heads * self.head_k_dim, self.value_heads * self.head_v_dim
        gate = self.hidden_size * values if self.use_gate else 0
        # a and beta from the input; A_log and dt_bias of their own.
        decay = (2 * self.hidden_size + 2) * self.value_heads
        rest = gate + decay + self.head_v_dim
        return self._parameters(keys, values, 2 * keys + values, rest)

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        return self._fla(
            model_type="gated_deltanet",
            head_dim=self.head_dim,
            expand_v=self.expand_v,
            num_v_heads=self.num_v_heads,
            use_gate=self.use_gate,
        )


Model = Annotated[DeltaNet | SharedDeltaNet | GatedDeltaNet, Field(discriminator="architecture")]


def shape_of(model: Model, ratio: float = 0.0) -> Shape:
    """A model's delta rule, whole or with that share of its key channels cut."""
    left = width(model.head_k_dim, ratio) if ratio else model.head_k_dim
    return Shape(model.kernel, model.num_heads, left, model.value_heads, model.head_v_dim)
