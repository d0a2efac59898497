"""Sharing out the GPUs of one machine between jobs: Snakemake counts them, but assigns none.

Each job takes as many as its rule asks for by locking a file per GPU. A lock ends with its process,
however that ends. On a cluster the scheduler has assigned them already.

A profile may cut every GPU into equal shares, since small models leave a large one idle: then
Snakemake counts shares. A job that asks for some of them may use as much of the memory of one GPU,
and shares it with other jobs; a job that asks for all of them has the GPU for itself.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statecut.errors import InputError

WAIT = 0.5  # seconds between two attempts
LOCKS = f"reproduction-gpus-{os.getuid()}"  # a folder
DRIVER = Path("/proc/driver/nvidia/version")


def gpu_shares(resources: Any) -> tuple[int, int]:
    """How many shares of GPUs a rule asks for, and how many the profile cuts each GPU into."""
    return int(resources.get("gpu", 0)), int(resources.get("gpu_shares", 1))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(driver.iterdir())))] if driver.is_dir() else []


@contextmanager
def gpus_taken(count: int, *, shares: int = 1, locks: Path | None = None) -> Iterator[list[str]]:
    """Take `count` shares of GPUs for the length of a block and hide all other GPUs from CUDA.

    Waits until they are free. Where none is visible none is taken: `require_gpus` asks torch. In a
    Slurm job all visible GPUs are kept, unless they are more than the job asks for: then it is one
    of several jobs in the allocation. One that asks for none sees none, and so does Triton.
    """
    visible, in_slurm = visible_gpus(), "SLURM_JOB_ID" in os.environ
    if count and (not visible or (in_slurm and len(visible) <= _gpus(count, shares))):
        yield visible
        return
    _check(count, shares, len(visible))
    taken = _wait_for(count, shares, visible, locks or _folder()) if count else {}
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
    """The folder of the locks. In another allocation of the same machine, the same names may be
    other GPUs."""
    allocation = os.environ.get("SLURM_JOB_ID")
    return Path(tempfile.gettempdir()) / (f"{LOCKS}-{allocation}" if allocation else LOCKS)


def require_gpus(rule: str, count: int, *, shares: int = 1) -> None:
    """An error unless torch can use the GPUs that a rule asks for: it would use the CPU instead.

    To be called inside `gpus_taken`: CUDA reads which GPUs are visible once in a process.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error below has what torch warns of
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = _gpus(count, shares)
    if usable >= wanted:
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = f"CUDA_VISIBLE_DEVICES {'not set' if named is None else repr(named)}"
    asks = f"rule {rule} asks for {wanted} GPU{'s' * (wanted > 1)}, and torch can use"
    if usable:
        raise InputError(
            f"{asks} {usable} ({visible}): let it have as many, or ask for less with "
            f"--set-resources {rule}:gpu={usable * shares}"
        )
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    raise InputError(
        f"{asks} none: {_why_no_gpu()}\n"
        f"  on {platform.node()}: torch {torch.__version__}, {built}; "
        f"driver {driver_version() or 'none found'}; {visible}\n"
        "  torch as pip installs it is built for CUDA 13.0, which needs driver 580.65 or newer: "
        "take a newer driver, or the same torch built for CUDA 12.6 (docs/install.md); or "
        "write `device: cpu` into the configuration, and the run is computed on CPUs"
    )


def _why_no_gpu() -> str:
    """The first line of torch's error when it is made to use a GPU."""
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return "it does not say why"


def driver_version() -> str | None:
    """Of NVIDIA's driver, from the kernel or, where that is hidden, from nvidia-smi."""
    if DRIVER.is_file():
        version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text())
        return version[0] if version else None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # no driver, or a container without its tool
    return next(iter(done.stdout.split()), None)


def limit_memory(fraction: float) -> None:
    """Keep this process to a part of the memory of its GPU, which it shares with others."""
    import torch

    torch.cuda.set_per_process_memory_fraction(fraction)


def _gpus(count: int, shares: int) -> int:
    """How many GPUs these shares are on."""
    return -(-count // shares)


Taken = dict[str, list[int]]
"""Open files whose locks are held, by GPU."""


def _check(count: int, shares: int, visible: int) -> None:
    if count > shares and count % shares:
        raise InputError(
            f"{count} shares of GPUs are asked for, and each has {shares}: "
            "ask for a part of one, or for whole ones"
        )
    if count > visible * shares:
        raise InputError(f"{_gpus(count, shares)} GPUs are asked for, this machine has {visible}")


def _wait_for(count: int, shares: int, visible: list[str], folder: Path) -> Taken:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _gpus(count, shares)
    while True:
        taken: Taken = {}
        for gpu in visible:
            if len(taken) == wanted:
                break
            if files := _lock_gpu(folder, gpu, count, shares):
                taken[gpu] = files
        if len(taken) == wanted:
            return taken
        # All or nothing: two jobs that each hold half of what they need would wait for ever.
        _release(taken)
        time.sleep(WAIT)


def _lock_gpu(folder: Path, gpu: str, count: int, shares: int) -> list[int]:
    """All of a GPU, if no other job has any of it; or some shares of it, if no other job has all of
    it and as many are free."""
    whole = count >= shares
    lock = _lock(folder / f"{gpu}.lock", fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
    if lock is None or whole:
        return [] if lock is None else [lock]
    files = [lock]
    for share in range(shares):
        file = _lock(folder / f"{gpu}.{share}.lock", fcntl.LOCK_EX)
        files += [] if file is None else [file]
        if len(files) == count + 1:
            return files
    _release({gpu: files})
    return []


def _lock(path: Path, mode: int) -> int | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _release(taken: Taken) -> None:
    for files in taken.values():
        for file in files:
            os.close(file)
