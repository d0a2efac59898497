"""Which GPUs of one machine a job uses: Snakemake counts them, but assigns none.

A job locks a file for each slot that its rule asks for; a lock ends with its process, however that
ends. A GPU has one slot, or `gpu_slots` of them if the profile says so, since small models leave a
large GPU idle: then jobs share it, and one that asks for all its slots has it for itself. On a
cluster the scheduler has assigned GPUs already.
"""

from __future__ import annotations

import fcntl
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from statecut.errors import InputError

WAIT = 0.5  # seconds between two attempts


def gpu_slots(resources: Any) -> tuple[int, int]:
    """How many slots a rule asks for, and how many the profile gives each GPU."""
    return int(resources.get("gpu", 0)), int(resources.get("gpu_slots", 1))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in named.split(",") if gpu]
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(driver.iterdir())))] if driver.is_dir() else []


@contextmanager
def gpus_taken(slots: int, *, per_gpu: int = 1) -> Iterator[list[str]]:
    """Wait for slots, some of one GPU or those of whole GPUs, and hide all other GPUs from CUDA for
    the length of a block. Those of a Slurm job are its own, unless it has more than it asks for:
    then it is one of several jobs in an allocation."""
    visible, wanted = visible_gpus(), -(-slots // per_gpu)
    if slots > per_gpu and slots % per_gpu:
        raise InputError(f"{slots} slots are asked for, a GPU has {per_gpu}: take whole GPUs")
    allocation = os.environ.get("SLURM_JOB_ID", "")
    if slots and (not visible or (allocation and len(visible) <= wanted)):
        yield visible  # where there is none, `require_gpus` finds out why
        return
    if wanted > len(visible):
        raise InputError(f"{wanted} GPUs are asked for, this machine has {len(visible)}")
    # In another allocation of the same machine, the same names may be other GPUs.
    folder = Path(tempfile.gettempdir()) / f"reproduction-gpus-{os.getuid()}-{allocation}"
    taken = _wait_for(wanted, visible, min(slots, per_gpu), per_gpu, folder)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)  # none: Triton sees none either
    try:
        yield [*taken]
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        _release(taken)


Taken = dict[str, list[IO[str]]]
"""Files whose locks are held, by GPU."""


def _wait_for(wanted: int, visible: list[str], slots: int, per_gpu: int, folder: Path) -> Taken:
    if wanted:
        folder.mkdir(exist_ok=True)
    while True:
        taken: Taken = {}
        for gpu in visible:
            if len(taken) < wanted and (files := _lock(gpu, slots, per_gpu, folder)):
                taken[gpu] = files
        if len(taken) == wanted:
            return taken
        # All or nothing: two jobs that each hold half of what they need would wait for ever.
        _release(taken)
        time.sleep(WAIT)


def _lock(gpu: str, slots: int, per_gpu: int, folder: Path) -> list[IO[str]]:
    """The locked files of so many slots of a GPU, or none."""
    files: list[IO[str]] = []
    for slot in range(per_gpu):
        file = open(folder / f"{gpu}.{slot}", "w")  # noqa: SIM115 (it holds the lock)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        files.append(file)
        if len(files) == slots:
            return files
    _release({gpu: files})
    return []


def _release(taken: Taken) -> None:
    for files in taken.values():
        for file in files:
            file.close()


def require_gpus(rule: str, wanted: int) -> None:
    """An error unless torch can use the GPUs that a rule asks for: it would use the CPU instead.

    To be called inside `gpus_taken`: CUDA reads which GPUs are visible once in a process.
    """
    if not wanted:
        return
    import torch
    from torch.utils import collect_env

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error below has what torch warns of
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable >= wanted:
        return
    try:
        torch.cuda.init()
        why = f"torch can use {usable}"
    except (AssertionError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    raise InputError(
        f"rule {rule} asks for {wanted} GPU{'s' * (wanted > 1)}: {why}\n"
        f"  on {platform.node()}: torch {torch.__version__}, {built}; driver "
        f"{collect_env.get_nvidia_driver_version(collect_env.run) or 'none found'}; "
        "CUDA_VISIBLE_DEVICES "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}\n"
        "  torch as pip installs it is built for CUDA 13.0, which needs driver 580.65 or newer: "
        "take a newer driver, or the same torch built for CUDA 12.6 (docs/guide/install.md); or "
        "write `device: cpu` into the configuration, and the run is computed on CPUs"
    )
