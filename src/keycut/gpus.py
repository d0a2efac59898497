"""Sharing out the GPUs of one machine between jobs: Snakemake counts them, but hands out none.

Each job takes as many as its rule asked for by locking a file per GPU. A lock ends with its
process, however that ends. On a cluster the scheduler has done it already.

A profile may cut every GPU into equal shares, since small models leave a large one idle: then
Snakemake counts shares. A job that asks for some of them has so much of the memory of one GPU, with
others beside it; one that asks for all of them is alone there.
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
def gpus_taken(asked: int, *, shares: int = 1, locks: Path | None = None) -> Iterator[list[str]]:
    """Take `asked` shares of GPUs for the length of a block and show no other GPU to CUDA.

    Waits until they are free. A machine without any has its jobs run on the CPU. A job of a cluster
    keeps what it was given; if that is more than it asked for, it is one of several in there.
    """
    there = visible_gpus()
    if not there or ("SLURM_JOB_ID" in os.environ and len(there) <= _gpus(asked, shares)):
        yield there
        return
    _refuse(asked, shares, len(there))
    taken = _wait_for(asked, shares, there, locks or _folder())
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


def _folder() -> Path:
    """Of the locks. Names of GPUs may mean others in another allocation of the same machine."""
    allocation = os.environ.get("SLURM_JOB_ID")
    return Path(tempfile.gettempdir()) / (f"{OURS}-{allocation}" if allocation else OURS)


def limit_memory(fraction: float) -> None:
    """Keep this process to a part of the memory of its GPU: there are others beside it."""
    import torch

    if fraction < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(fraction)


def _gpus(asked: int, shares: int) -> int:
    """GPUs that so many shares are on."""
    return -(-asked // shares)


Taken = dict[str, list[int]]
"""Open files whose locks are held, by GPU."""


def _refuse(asked: int, shares: int, there: int) -> None:
    if asked > shares and asked % shares:
        raise InputError(
            f"{asked} shares of GPUs are asked for, and each has {shares}: "
            "ask for a part of one, or for whole ones"
        )
    if asked > there * shares:
        raise InputError(f"{_gpus(asked, shares)} GPUs are asked for, this machine has {there}")


def _wait_for(asked: int, shares: int, there: list[str], folder: Path) -> Taken:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _gpus(asked, shares)
    while True:
        taken: Taken = {}
        for gpu in there:
            if len(taken) == wanted:
                break
            whole = asked >= shares
            held = _whole(folder, gpu) if whole else _part(folder, gpu, asked, shares)
            if held:
                taken[gpu] = held
        if len(taken) == wanted:
            return taken
        # All or nothing: two jobs that each hold half of what they need would wait for ever.
        _release(taken)
        time.sleep(WAIT)


def _whole(folder: Path, gpu: str) -> list[int]:
    """All of a GPU, if nobody has any of it."""
    file = _locked(folder / f"{gpu}.lock", fcntl.LOCK_EX)
    return [] if file is None else [file]


def _part(folder: Path, gpu: str, asked: int, shares: int) -> list[int]:
    """So many shares of a GPU, if nobody has all of it and as many are free."""
    shared = _locked(folder / f"{gpu}.lock", fcntl.LOCK_SH)
    if shared is None:
        return []
    held = [shared]
    for share in range(shares):
        file = _locked(folder / f"{gpu}.{share}.lock", fcntl.LOCK_EX)
        held += [] if file is None else [file]
        if len(held) == asked + 1:
            return held
    _close(held)
    return []


def _locked(path: Path, how: int) -> int | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _release(taken: Taken) -> None:
    for held in taken.values():
        _close(held)


def _close(held: list[int]) -> None:
    for file in held:
        os.close(file)
