"""fla's kernels made ready for the machine at hand: `prepare`.

Without a GPU plain functions stand in for them (`keycut.models.cpu`). With one, candidates that the
assembler gets wrong are left out, choices of tiles are kept (`keycut.models.tiles`), and where one
has to be made its candidates are compiled on all cores: Triton compiles and times one after
another, while the GPU and all cores but one wait. It makes no difference to what is timed.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

from keycut.models import cpu, tiles

HOPPER = 90
# What ptxas 12.8, the assembler that Triton 3.6 and 3.7 use for Hopper, compiles wrong: with four
# warps and blocks of so many keys the backward pass reads outside of its memory. ptxas 13.1 is
# right. docs/hopper-backward.py compares them; triton issue 11366, fla issue 1262.
WRONG_KERNEL = "chunk_bwd_kernel_dqkwg"
WRONG_WARPS = 4
WRONG_BLOCKS = (16, 32)
RIGHT_SINCE = (13, 1)


def prepare() -> None:
    """For all that this process runs from now on. Safe to repeat."""
    if triton_device():
        leave_out_miscompiled()
        tiles.keep_choices()
        compile_on_all_cores()
    else:
        cpu.install()


def triton_device() -> bool:
    """Whether Triton can drive a device here (fla asks the same question)."""
    from fla.utils import device_platform

    return bool(device_platform != "cpu")


def leave_out_miscompiled() -> None:
    """The backward kernel of all delta rules never tries a tile that is compiled wrong here."""
    from fla.ops.common import chunk_o

    tuner = getattr(chunk_o, WRONG_KERNEL)
    while not hasattr(tuner, "early_config_prune"):  # functions of its arguments stand around it
        tuner = tuner.fn
    tuner.early_config_prune = lambda configs, nargs, **given: right(configs, given["BK"])


def right(configs: list[Any], block: int) -> list[Any]:
    """Without those that are compiled wrong for so many keys in a block."""
    if block not in WRONG_BLOCKS or not assembler_is_affected():
        return configs
    return [config for config in configs if config.num_warps != WRONG_WARPS]


def assembler_is_affected() -> bool:
    """Whether Triton compiles for a Hopper, with a ptxas that gets it wrong."""
    from triton.runtime.driver import driver

    if driver.active.get_current_target().arch != HOPPER:
        return False
    from triton.backends.nvidia.compiler import get_ptxas

    return tuple(map(int, get_ptxas(HOPPER).version.split("."))) < RIGHT_SINCE


def compile_on_all_cores() -> None:
    from triton.runtime.autotuner import Autotuner

    time_one = Autotuner._bench
    if hasattr(time_one, "__wrapped__"):
        return

    @wraps(time_one)
    def compiled_first(tuner: Any, *args: Any, config: Any, **given: Any) -> Any:
        candidates = tuner.prune_configs(given)
        if config is candidates[0]:
            compile_all(tuner.fn, candidates, args, given)
        return time_one(tuner, *args, config=config, **given)

    Autotuner._bench = compiled_first


def compile_all(
    kernel: Any, candidates: list[Any], args: tuple[Any, ...], given: dict[str, Any]
) -> None:
    """One that does not compile fails when its turn to be timed comes, as it would without this."""
    from triton import AsyncCompileMode

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for config in candidates:
            kernel.run(*args, **{**given, "warmup": True}, **config.all_kwargs())
