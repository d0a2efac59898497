"""flash-linear-attention 0.6.0."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from statecut.models import plain_kernels
from statecut.models.architectures import ARCHITECTURES
from statecut.models.architectures.base import StandIn


def stand_ins() -> list[StandIn]:
    """Of fla's models in general, and of each architecture."""
    entries = [*plain_kernels.FLA]
    for adapter in ARCHITECTURES.values():
        entries += adapter.stand_ins()
    # Several architectures may look up one: what is replaced twice could not be put back.
    return [*{entry[:2]: entry for entry in entries}.values()]


def use_plain_kernels() -> None:
    """Put plain PyTorch functions in the places of its Triton kernels, where there is no GPU.

    Classes, parameters and configurations stay as they are. Safe to repeat.
    Upstream: none known. fla is written for devices that Triton drives; TRITON_INTERPRET=1 does
    not help, since the autotuner asks for a driver.
    Goes when fla runs on a CPU by itself.
    """
    # torch warns with a stack trace, once per process, where a CPU has no bf16 of its own.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    _replace_kernels()


@contextmanager
def plain_kernels_in_place() -> Iterator[None]:
    """The same for a while, on a GPU too: the preflight compares a layer with itself.

    Upstream: none known. Goes with the preflight.
    """
    originals = _replace_kernels()
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def _replace_kernels() -> list[tuple[Any, str, Any]]:
    """The module, name and value of all that was there before."""
    originals = []
    for path, name, plain in stand_ins():
        module = importlib.import_module(path)
        if not hasattr(module, name):
            raise RuntimeError(f"{path}.{name} is gone: not the fla version Statecut is pinned to")
        originals.append((module, name, getattr(module, name)))
        setattr(module, name, plain)
    return originals
