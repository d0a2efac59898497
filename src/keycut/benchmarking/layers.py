"""One mixer layer of flash-linear-attention, by its widths."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from keycut.config import Kernel
from keycut.models.architectures import RULES

SEED = 0


def fla_layers() -> None:
    """fla's layers, imported and runnable also where there is no GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        import fla.layers  # noqa: F401
    from keycut.models import kernels

    kernels.prepare()


def mixer(kernel: Kernel, *, device: str, dtype: torch.dtype, **sizes: int) -> Any:
    """A layer of these sizes (`DeltaRule.layer`), its random weights the same for the same seed
    and device."""
    fla_layers()
    torch.manual_seed(SEED)
    with torch.device(device):
        return RULES[kernel].layer(**sizes).to(dtype)
