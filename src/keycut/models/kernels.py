"""fla's kernels made ready for the machine at hand: `prepare`.

Without a GPU plain functions stand in for them (`keycut.models.cpu`). With one, they are compiled
on all cores. A tuned kernel is compiled for every tile it may use, dozens of them, which are timed
for one to be kept. Triton compiles and times one after another, for minutes, while the GPU and all
cores but one wait; here all are compiled first, side by side. It makes no difference to what is
timed or kept.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

from keycut.models import cpu


def prepare() -> None:
    """For all that this process runs from now on. Safe to repeat."""
    if triton_device():
        compile_on_all_cores()
    else:
        cpu.install()


def triton_device() -> bool:
    """Whether Triton can drive a device here (fla asks the same question)."""
    from fla.utils import device_platform

    return bool(device_platform != "cpu")


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
