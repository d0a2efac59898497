"""How models are pretrained and recovered."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, Strict, model_validator

from reproduction.config.section import Fractional, Section, Seed, SliceName, Some
from statecut.recovery import settings


class Training(Section):
    """What pretraining and recovery have in common: AdamW, linear warm-up, cosine to a floor."""

    data: SliceName = Field(description="what is trained on, as corpus/slice")
    epochs: PositiveInt = Field(1, description="most passes over that slice")
    steps: PositiveInt = Field(description="optimizer steps")
    batch: PositiveInt = Field(description="sequences per step and GPU")
    learning_rate: PositiveFloat = Field(description="peak learning rate")
    warmup: int = Field(description="steps of linear warm-up", ge=0)
    floor: Fractional = Field(description="final learning rate, as a fraction of the peak")
    betas: Annotated[tuple[Fractional, Fractional], Strict(False)] = Field(
        (0.9, 0.95), description="AdamW's two decay rates"
    )
    eps: PositiveFloat = Field(description="AdamW's epsilon")
    weight_decay: float = Field(0.1, description="AdamW's weight decay", ge=0)
    clip: PositiveFloat = Field(description="largest norm of the gradient")
    seed: Seed = Field(description="seed of initial weights and data order")

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup >= self.steps:
            raise ValueError(f"warmup {self.warmup} must be less than steps {self.steps}")
        return self

    @property
    def sequences(self) -> int:
        """Sequences seen in the whole training."""
        return self.steps * self.batch


class Recipe(Training):
    """How a model is pretrained."""

    trainer: Literal["flame", "builtin"] = Field(description="flame, as in the paper, or our own")
    world_size: PositiveInt = Field(1, description="GPUs; batch x world_size is the real batch")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the weights in the file"
    )
    activation_checkpoint: Literal["none", "selective", "full"] = Field(
        "none",
        description="flame's: for less memory and the same result, compute activations of every "
        "second or every layer again; reruns nothing",
    )

    @model_validator(mode="after")
    def _flame_checkpoints(self) -> Self:
        if self.trainer != "flame" and self.activation_checkpoint != "none":
            raise ValueError("activation_checkpoint: the built-in trainer keeps all activations")
        return self

    @property
    def sequences(self) -> int:
        return super().sequences * self.world_size

    @property
    def gpus(self) -> int:
        """How many GPUs the trainer uses."""
        return self.world_size if self.trainer == "flame" else 1

    def defining(self, **options: Any) -> dict[str, Any]:
        """The settings that define the trained model, without those that only make it fit."""
        return self.model_dump(mode="json", exclude={"activation_checkpoint"}, **options)

    def settings(self) -> settings.Training:
        """For one device: the batches of several GPUs are computed one after another."""
        values = {name: getattr(self, name) for name in Training.model_fields}
        return settings.Training(
            **values | {"batch": self.batch * self.world_size},
            gradient_accumulation_steps=self.world_size,
        )


class Lora(Section):
    """The low-rank adapters of recovery."""

    rank: PositiveInt = Field(description="rank r")
    alpha: PositiveFloat = Field(description="scale alpha; updates are multiplied by alpha / r")
    modules: Some[str] | None = Field(None, description="with an adapter; q, k and v if absent")


class Distillation(Section):
    """Learning from the unpruned model during recovery."""

    temperature: PositiveFloat = Field(description="temperature of both distributions")
    weight: PositiveFloat = Field(description="weight of the divergence beside the cross-entropy")


class Recovery(Training):
    """Recovery fine-tuning (RFT) of pruned models: adapters and convolutions learn, the rest but
    for `norms_and_biases` is frozen."""

    gradient_accumulation_steps: PositiveInt = Field(
        1, description="more need less memory; reruns nothing"
    )
    norms_and_biases: bool = Field(False, description="train all norms and biases too")
    lora: Lora = Field(description="the adapters")
    distillation: Distillation = Field(description="the teacher's part")
    control: bool = Field(True, description="recover the unpruned model too")
    seeds: Some[Seed] | None = Field(
        None, description="of the run's; if absent, all. The n-th recovers with `seed` + n - 1"
    )

    @model_validator(mode="after")
    def _divides_the_batch(self) -> Self:
        if self.batch % self.gradient_accumulation_steps:
            raise ValueError(f"gradient_accumulation_steps must divide batch {self.batch}")
        return self

    def defining(self, **options: Any) -> dict[str, Any]:
        """The settings that define a recovered model: neither which models are recovered, nor how
        a batch is divided."""
        left_out = {"control", "seeds", "gradient_accumulation_steps"}
        return self.model_dump(mode="json", exclude=left_out, **options)

    def settings(self) -> settings.Recovery:
        values = {name: value for name, value in self if name not in ("control", "seeds")}
        values["lora"] = settings.Lora(**dict(self.lora))
        values["distillation"] = settings.Distillation(**dict(self.distillation))
        return settings.Recovery(**values)
