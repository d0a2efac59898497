"""flash-linear-attention 0.6.0."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keycut.models import plain_kernels
from keycut.models.architectures import ARCHITECTURES
from keycut.models.architectures.base import StandIn

HOPPER = 90
MISCOMPILED_KERNEL = "chunk_bwd_kernel_dqkwg"
MISCOMPILED_WARPS = 4
MISCOMPILED_BLOCKS = (16, 32)
FIRST_CORRECT_PTXAS = (13, 1)


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
            raise RuntimeError(f"{path}.{name} is gone: not the fla version Keycut is pinned to")
        originals.append((module, name, getattr(module, name)))
        setattr(module, name, plain)
    return originals


def leave_out_miscompiled_tiles() -> None:
    """The backward kernel of all delta rules never tries a tile that is compiled wrong.

    With four warps and blocks of 16 or 32 keys it reads outside of its memory on a Hopper: ptxas
    12.8, which Triton 3.6 and 3.7 use there, miscompiles it, and 13.1 does not
    (docs/hopper-backward.py compares them). fla leaves out such tiles in its other kernels.
    Upstream: triton issue 11366, flash-linear-attention issue 1262.
    Goes when Triton brings ptxas 13.1 for Hopper, or fla leaves them out here too.
    """
    from fla.ops.common import chunk_o

    tuner = getattr(chunk_o, MISCOMPILED_KERNEL)
    while not hasattr(tuner, "early_config_prune"):  # functions of its arguments stand around it
        tuner = tuner.fn
    tuner.early_config_prune = lambda configs, nargs, **arguments: compiled_right(
        configs, arguments["BK"]
    )


def compiled_right(configs: list[Any], block: int) -> list[Any]:
    """Without the tiles that are miscompiled for blocks of so many keys."""
    if block not in MISCOMPILED_BLOCKS or not assembler_is_affected():
        return configs
    return [config for config in configs if config.num_warps != MISCOMPILED_WARPS]


def assembler_is_affected() -> bool:
    """Whether Triton compiles for a Hopper, with a ptxas that gets it wrong."""
    from triton.runtime.driver import driver

    if driver.active.get_current_target().arch != HOPPER:
        return False
    from triton.backends.nvidia.compiler import get_ptxas

    return tuple(map(int, get_ptxas(HOPPER).version.split("."))) < FIRST_CORRECT_PTXAS
