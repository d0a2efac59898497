"""What the record of a recovered model says."""

from __future__ import annotations

from typing import Any

from statecut.models.checkpoint import Checkpoint
from statecut.recovery.settings import Recovery


def recovered_facts(
    settings: Recovery, length: int, student: Checkpoint, teacher: Checkpoint
) -> dict[str, Any]:
    lora, distillation = settings.lora, settings.distillation
    modules = ", ".join(lora.modules or student.architecture.projections)
    tokens = f"{settings.batch} x {length} tokens of {settings.data}"
    return {
        "recovery": f"{settings.steps} steps of {tokens}",
        "adapters, merged": f"rank {lora.rank}, alpha {lora.alpha:g} on {modules}",
        **({"also trained": "norms and biases"} if settings.norms_and_biases else {}),
        "distillation": f"temperature {distillation.temperature:g}, weight {distillation.weight:g}",
        "teacher digest": teacher.digest(),
    }
