"""The settings of training and of recovery."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Training:
    """AdamW, a linear warm-up, a cosine to a floor."""

    data: str  # the name of the text
    epochs: int = 1  # most passes over it
    steps: int
    batch: int  # sequences per step
    gradient_accumulation_steps: int = 1  # that a batch is divided into
    learning_rate: float  # at its peak
    warmup: int  # steps
    floor: float = 0.1  # the final learning rate, as a fraction of the peak
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-15
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    seed: int

    @property
    def sequences(self) -> int:
        """Sequences seen in the whole training."""
        return self.steps * self.batch

    def defining(self) -> dict[str, Any]:
        """What the result depends on; gradient accumulation changes only its rounding."""
        values = asdict(self)
        del values["gradient_accumulation_steps"]
        return values


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, whose updates are multiplied by alpha / rank."""

    rank: int = 16
    alpha: float = 32.0
    modules: tuple[str, ...] | None = None  # projections with an adapter; those of q, k and v


@dataclass(frozen=True)
class Distillation:
    """Learning from the unpruned model: cross-entropy + weight * divergence."""

    temperature: float = 2.0  # of both distributions
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recovery(Training):
    """Recovery fine-tuning of a pruned model; defaults are the paper's."""

    norms_and_biases: bool = False  # train them, too
    lora: Lora = Lora()
    distillation: Distillation = Distillation()
