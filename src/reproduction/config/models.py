"""Models: their sizes, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    create_model,
    model_validator,
)

from reproduction.config.section import WHICH, Cut, Name, Section
from reproduction.config.sources import FromDisk, FromHub, RandomWeights
from statecut.arguments import width
from statecut.errors import InputError
from statecut.models.architectures import ARCHITECTURES, SECTIONS, base
from statecut.models.shapes import Kernel, MixerShape, Shape


class Pretrained(Section):
    """A model trained by this run."""

    kind: Literal["pretrain"] = WHICH
    recipe: Name = Field(description="one of `recipes`")
    trainings: PositiveInt = Field(
        1, description="of this model, which tables may average; NAME-training1 is the second"
    )
    training: NonNegativeInt = Field(
        0, description="added to the recipe's seed; `trainings` counts it up"
    )


class ModelBase(Section):
    """What the configuration says of any model, beside the sizes that its architecture takes."""

    architecture: str = WHICH
    label: str = Field(description="name in tables and figures")
    source: Annotated[
        Pretrained | FromHub | FromDisk | RandomWeights, Field(discriminator="kind")
    ] = Field(description="where its weights come from")
    tokenizer: Name = Field(description="one of `tokenizers`")
    vocab_size: PositiveInt = Field(32000, description="rows of the embedding")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_hidden_layers: PositiveInt = Field(description="number of layers")
    num_heads: PositiveInt = Field(description="heads of keys and queries")
    conv_size: PositiveInt = Field(4, description="taps of the short convolutions")
    intermediate_size: PositiveInt | None = Field(
        None, description="width of the MLP; if absent 8/3 of hidden_size, up to a multiple of 256"
    )
    tie_word_embeddings: bool = Field(False, description="input and output embeddings are one")
    published_as: Name | None = Field(None, description="its name in config/published/values.csv")

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        section = SECTIONS[self.architecture]
        sizes = self.model_dump(
            exclude={"architecture", "label", "source", "tokenizer", "published_as"}
        )
        sizes |= {"model_type": section.model_type, "intermediate_size": self.mlp_width}
        return section.config(sizes)

    @property
    def training(self) -> int:
        """Which of a model's trainings it is; 0 of one that the run does not train."""
        return self.source.training if isinstance(self.source, Pretrained) else 0

    @property
    def parameters(self) -> int:
        section, config, shape = SECTIONS[self.architecture], self.fla_config(), self.mixer_shape
        delta_layers = len(shape.layers)
        mixers = delta_layers * section.mixer_parameters(config, shape)
        mixers += (self.num_hidden_layers - delta_layers) * section.softmax_parameters(config)
        layer = 3 * self.hidden_size * self.mlp_width + 2 * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + mixers + self.num_hidden_layers * layer + self.hidden_size

    @property
    def adapter(self) -> base.Architecture:
        return ARCHITECTURES[SECTIONS[self.architecture].model_type]

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


def _section(section: base.Section) -> type[ModelBase]:
    """What the configuration may say of a model, from what the file of its architecture says."""
    above_zero = {int: PositiveInt, float: PositiveFloat}

    def type_of(size: base.Size) -> Any:
        kind: Any = above_zero.get(size.type, size.type)
        return kind | None if size.default is None else kind

    # Under its name in this module: a benchmark sends a model to a process of its own.
    model = globals()[section.name] = create_model(  # type: ignore[call-overload]
        section.name,
        __base__=ModelBase,
        __module__=__name__,
        __doc__=section.about,
        architecture=(Literal[section.architecture], WHICH),
        **{
            size.name: (type_of(size), Field(size.default, description=size.description))
            for size in section.sizes
        },
    )
    return model


if TYPE_CHECKING:
    Model = ModelBase
else:
    Model = Annotated[
        reduce(or_, map(_section, SECTIONS.values())), Field(discriminator="architecture")
    ]


def training_name(model: str, training: int) -> str:
    """A training of a model; the first has the model's own name."""
    return f"{model}-training{training}" if training else model


def trained_again(name: str, model: Model) -> Iterator[tuple[str, Model]]:
    """The trainings of a model beside the first: models with its name in results."""
    source = model.source
    for training in range(1, source.trainings) if source.kind == "pretrain" else ():
        again = {
            "label": f"{model.label}, training {training}",
            "published_as": model.published_as or name,
            "source": source.model_copy(update={"trainings": 1, "training": training}),
        }
        yield training_name(name, training), model.model_copy(update=again)


def cut_shape(model: Model, cut: Cut = 0.0) -> MixerShape:
    """A model's mixer, whole or cut."""
    if isinstance(cut, str):
        keys, values = map(int, cut.split("x"))
        return replace(model.mixer_shape, width=keys, value_width=values)
    keys = width(model.head_k_dim, cut) if cut else model.head_k_dim
    return replace(model.mixer_shape, width=keys)


def shape_of(model: Model, cut: Cut = 0.0) -> Shape:
    """What the kernels of its delta rule are compiled for."""
    mixer = cut_shape(model, cut)
    return Shape(model.kernel, mixer.heads, mixer.width, mixer.value_heads, mixer.value_width)
