"""Models: their sizes, and what follows from them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import Field, PositiveInt, model_validator

from reproduction.config.section import WHICH, Late, Name, NameOf, Section
from reproduction.config.sources import FromDisk, FromHub
from statecut.arguments import width
from statecut.errors import InputError
from statecut.models.shapes import Kernel, Shape

if TYPE_CHECKING:
    from statecut.models.architectures.base import Architecture
    from statecut.models.shapes import MixerShape


class Pretrained(Section):
    """A model trained by this run."""

    kind: Literal["pretrain"] = WHICH
    recipe: Annotated[Name, NameOf("recipes")] = Field(description="one of `recipes`")


class ModelBase(Section):
    model_type: ClassVar[str]
    label: str = Field(description="name in tables and figures")
    source: Annotated[Pretrained | FromHub | FromDisk, Field(discriminator="kind")] = Field(
        description="where its weights come from"
    )
    tokenizer: Annotated[Name, NameOf("tokenizers")] = Field(description="one of `tokenizers`")
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

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        sizes = self.model_dump(
            exclude={"architecture", "label", "source", "tokenizer", "published_as"}
        )
        return {**sizes, "model_type": self.model_type, "intermediate_size": self.mlp_width}

    @property
    @abstractmethod
    def parameters(self) -> int: ...

    @property
    def adapter(self) -> Architecture:
        from statecut.models.architectures import ARCHITECTURES

        return ARCHITECTURES[self.model_type]

    @property
    def mixer_shape(self) -> MixerShape:
        return self.adapter.shape(self.fla_config())

    @model_validator(mode="after")
    def _heads_are_whole(self) -> Self:
        try:
            self.mixer_shape  # noqa: B018
        except InputError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def kernel(self) -> Kernel:
        rule = self.adapter.rule
        assert rule is not None, "an architecture without one has no section"
        return rule.name

    @property
    def value_heads(self) -> int:
        return self.mixer_shape.value_heads

    @property
    def head_k_dim(self) -> int:
        return self.mixer_shape.width

    @property
    def head_v_dim(self) -> int:
        return self.mixer_shape.value_width

    @property
    def filter_sharing(self) -> str:
        """Whose channels have one convolution filter: "none", "head" or "all"."""
        return getattr(self, "conv_sharing", "none")

    @property
    def mlp_width(self) -> int:
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-int(self.hidden_size * 4 * 2 / 3) // 256) * 256

    def _parameters(
        self, key_dim: int, value_dim: int, filters: int, rest: int, *, softmax: int = 0
    ) -> int:
        """All parameters, given the sums over heads and what one mixer has beside projections;
        `softmax` is what a layer has in its place that has no delta rule."""
        mixer = 2 * self.hidden_size * (key_dim + value_dim) + self.conv_size * filters + rest
        delta_layers = len(self.mixer_shape.layers)
        mixers = delta_layers * mixer + (self.num_hidden_layers - delta_layers) * softmax
        layer = 3 * self.hidden_size * self.mlp_width + 2 * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + mixers + self.num_hidden_layers * layer + self.hidden_size


def _sections() -> Any:
    from statecut.models.architectures import SECTIONS

    return Annotated[Union[SECTIONS], Field(discriminator="architecture")]  # noqa: UP007


# The section of an architecture is in its file of `statecut.models.architectures`.
Model = Annotated[ModelBase, Late(_sections)]


def shape_of(model: Model, ratio: float = 0.0) -> Shape:
    """A model's delta rule, whole or with that share of its key channels cut."""
    left = width(model.head_k_dim, ratio) if ratio else model.head_k_dim
    heads = model.adapter.call.heads(model.mixer_shape)
    return Shape(model.kernel, heads, left, model.value_heads, model.head_v_dim)


def state_bytes(model: Model, ratio: float = 0.0) -> int:
    """The recurrent state of one sequence, in all layers."""
    return replace(model.mixer_shape, width=shape_of(model, ratio).width).state_bytes()
