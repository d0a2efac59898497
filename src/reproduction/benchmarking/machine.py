"""What a measurement was made on."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from reproduction.running.gpus import driver_version
from statecut import __version__

VERSIONED = ("torch", "triton", "flash-linear-attention", "transformers")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def timed_dtype(device: str) -> torch.dtype:
    """bf16 as models are used; many CPUs have no fast one."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def machine(device: str) -> dict[str, Any]:
    """The device, whose kernels run on it, and the versions of all that takes part."""
    gpu = device == "cuda"
    return {
        "device": device,
        "dtype": str(timed_dtype(device)).removeprefix("torch."),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": driver_version() if gpu else None,
        "backend": "triton" if gpu else "plain PyTorch",
        "versions": {
            "statecut": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in VERSIONED},
        },
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"  # a folder on the path, never installed
