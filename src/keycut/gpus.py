"""Sharing out the GPUs of one machine between jobs: Snakemake counts them, but hands out none.

Each job takes as many as its rule asked for by locking a file per GPU. A lock ends with its
process, however that ends. On a cluster the scheduler has done it already.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keycut.errors import InputError

WAIT = 0.5  # seconds between two looks
OURS = f"keycut-gpus-{os.getuid()}"  # a folder of locks


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    there = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(there.iterdir())))] if there.is_dir() else []


@contextmanager
def gpus_taken(count: int, *, locks: Path | None = None) -> Iterator[list[str]]:
    """Take `count` GPUs for the length of a block and show no other to CUDA.

    Waits until they are free. A machine without any has its jobs run on the CPU, and a job of a
    cluster keeps what it was given.
    """
    there = visible_gpus()
    if not there or "SLURM_JOB_ID" in os.environ:
        yield there
        return
    if count > len(there):
        raise InputError(f"{count} GPUs are asked for, this machine has {len(there)}")
    taken = _wait_for(count, there, locks or Path(tempfile.gettempdir()) / OURS)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
    try:
        yield list(taken)
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        _release(taken)


def _wait_for(count: int, there: list[str], folder: Path) -> dict[str, int]:
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        taken = _lock(there, count, folder)
        if len(taken) == count:
            return taken
        # All or nothing: two jobs that each hold half of what they need would wait for ever.
        _release(taken)
        time.sleep(WAIT)


def _lock(there: list[str], count: int, folder: Path) -> dict[str, int]:
    taken: dict[str, int] = {}
    for gpu in there:
        if len(taken) == count:
            break
        file = os.open(folder / f"{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        else:
            taken[gpu] = file
    return taken


def _release(taken: dict[str, int]) -> None:
    for file in taken.values():
        os.close(file)
