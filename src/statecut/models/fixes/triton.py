"""Triton 3.7.1: which assembler it takes, and how it tunes kernels."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, wraps
from typing import Any

logger = logging.getLogger(__name__)

HOPPER, BLACKWELL = 90, 100  # compute capabilities
COUNTS = {"B", "H", "HV", "NB"}  # sequences, heads of keys and of values, blocks of tokens
CUDA_13 = 13_000


def assemble_with_ptxas_13() -> None:
    """For a Hopper, take the ptxas 13.1 that Triton's wheel has for a Blackwell. Safe to repeat.

    Its ptxas 12.8 miscompiles some delta rules with 32 channels and fewer: the backward pass reads
    outside of its memory at d_k 16 and 32 (docs/reference/hopper-backward.md), the forward pass of
    DeltaNet at d_k 32 and d_v 64 is wrong without an error. A TRITON_PTXAS_PATH of the user's is
    respected. A driver of CUDA 12 loads nothing that ptxas 13 makes: there the old one stays, with
    a warning, and it is the preflight that finds the shapes which it gets wrong.
    Upstream: triton issue 11366, flash-linear-attention issue 1262.
    Goes when Triton takes ptxas 13.1 or newer for Hopper.
    """
    from triton import knobs
    from triton.backends.nvidia import compiler

    def newer(arch: int) -> Any:
        takes_newer = arch >= BLACKWELL or (
            arch >= HOPPER and "TRITON_PTXAS_PATH" not in os.environ and driver_loads_cuda_13()
        )
        return knobs.nvidia.ptxas_blackwell if takes_newer else knobs.nvidia.ptxas

    compiler.get_ptxas = newer
    compiler.get_ptxas_version.cache_clear()  # a part of the names of kernels in Triton's cache


@cache
def driver_loads_cuda_13() -> bool:
    """Whether what ptxas 13 makes can be loaded here; a warning, once, if not."""
    version = driver_cuda()
    if version < CUDA_13:
        logger.warning(
            f"the NVIDIA driver is of CUDA {version // 1000}.{version % 1000 // 10}: kernels are "
            "assembled by ptxas 12.8, which gets some heads of 32 channels and fewer wrong on a "
            "Hopper. See which by `statecut preflight`, or install driver 580 or newer"
        )
    return version >= CUDA_13


def driver_cuda() -> int:
    """The CUDA version that the driver is of, as 12080; new where the driver does not say."""
    version = ctypes.c_int(CUDA_13)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def tune_once_for_all_counts() -> None:
    """What was tuned serves all numbers of sequences, heads and blocks of tokens: they change how
    many tiles there are, not which one is fast. Safe to repeat.

    fla has them in the keys of some kernels. Each new batch would be tuned again, and the search
    for the largest one fails: tuning needs memory of its own, and holds what it fails on.
    Upstream: flash-linear-attention issues 704 and 1147 (tuning takes minutes).
    Goes when its keys hold no counts.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.check_disk_cache
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def look_up(tuner: Any, key: Any, candidates: list[Any], choose: Callable[[], None]) -> bool:
        short = without_counts(tuner, key)
        known = short in tuner.cache or original(tuner, short, candidates, choose)
        tuner.cache.setdefault(short, tuner.cache.get(key))
        tuner.cache[key] = tuner.cache[short]
        return known

    Autotuner.check_disk_cache = look_up


def without_counts(tuner: Any, key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuning key has the values of `tuner.keys`, without those that candidates set themselves,
    then the types of tensors. It stays as it is if a value was not given: which is not known."""
    names = [name for name in tuner.keys if name not in tuner.configs[0].kwargs]
    types = tuple(value for value in key if str(value).startswith("torch."))
    values = key[: len(key) - len(types)]
    if len(values) != len(names):
        return key
    named = zip(names, values, strict=True)
    return (*(f"{name}={value}" for name, value in named if name not in COUNTS), *types)


def compile_on_all_cores() -> None:
    """All candidates of a kernel are compiled before the first is timed. Safe to repeat.

    Triton compiles and times one after another, while the GPU and all cores but one wait. It makes
    no difference to what is timed. fla has Triton keep what it chose for a shape in
    TRITON_CACHE_DIR (FLA_CACHE_RESULTS).
    Upstream: flash-linear-attention issues 704 and 1147 (tuning takes minutes).
    Goes when Triton's autotuner compiles its candidates in parallel.
    """
    from triton import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    original, cores = Autotuner._bench, len(os.sched_getaffinity(0))
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def compile_first(tuner: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        candidates = tuner.prune_configs(kwargs)
        if config is candidates[0]:
            # One that does not compile fails when its turn to be timed comes, as without this.
            with ThreadPoolExecutor(cores) as pool, AsyncCompileMode(pool, ignore_errors=True):
                for candidate in candidates:
                    options = {**kwargs, **candidate.all_kwargs(), "warmup": True}
                    tuner.fn.run(*args, **options)
        return original(tuner, *args, config=config, **kwargs)

    Autotuner._bench = compile_first


def skip_timing(tuner: Any) -> None:
    """A kernel takes the first of its candidates that runs, and keeps no choice on disk.

    For the preflight, which tries all of them whatever their speed, on sequences so short that
    their timings are of no use to anyone else. Goes with the preflight.
    """

    def run_once(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        call()
        return [0.0] * len(quantiles)

    tuner.do_bench, tuner.cache_results = run_once, False
