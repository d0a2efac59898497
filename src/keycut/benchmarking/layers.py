"""One mixer layer of flash-linear-attention, by its widths."""

from __future__ import annotations

from typing import Any

import torch

from keycut.config import Kernel
from keycut.models import kernels
from keycut.models.architectures import RULES

SEED = 0


def mixer(kernel: Kernel, *, device: str, dtype: torch.dtype, **sizes: int) -> Any:
    """A layer of these sizes (`DeltaRule.layer`), its random weights the same for the same seed
    and device."""
    kernels.prepare()
    torch.manual_seed(SEED)
    with torch.device(device):
        return RULES[kernel].layer(**sizes).to(dtype)
