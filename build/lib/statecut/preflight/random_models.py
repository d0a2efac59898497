"""Layers and models with random weights: only their shapes count."""

from __future__ import annotations

from typing import Any

import torch
from reproduction.benchmarking.machine import timed_dtype

from reproduction.config import Model
from statecut.models import create, kernels
from statecut.models.architectures import RULES, architecture
from statecut.models.shapes import Kernel

SEED = 0


def random_layer(kernel: Kernel, *, device: str, dtype: torch.dtype, **sizes: int) -> Any:
    """A mixer layer of these sizes (`DeltaRule.layer`), its weights the same for the same seed and
    device."""
    kernels.prepare()
    torch.manual_seed(SEED)
    with torch.device(device):
        return RULES[kernel].layer(**sizes).to(dtype)


def random_model(spec: Model, width: int, device: str) -> Any:
    """The model with d_k = width, made where it will run."""
    config = spec.fla_config()
    with torch.device(device):
        resized = architecture(config).resized(config, width)
        return create(resized, seed=SEED, dtype=timed_dtype(device))


def random_tokens(model: Any, *shape: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, shape, device=model.device)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())
