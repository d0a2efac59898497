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

from keycut.errors import InputError

WAIT = 0.5  # seconds between two looks
OURS = f"keycut-gpus-{os.getuid()}"  # a folder of locks
DRIVER = Path("/proc/driver/nvidia/version")


def gpu_shares(resources: Any) -> tuple[int, int]:
    """How many shares of GPUs a rule asks for, and how many the profile cuts each GPU into."""
    return int(resources.get("gpu", 0)), int(resources.get("gpu_shares", 1))


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

    Waits until they are free. Where none is seen nothing is taken: `require_gpus` asks torch. A job
    of a cluster keeps what it was given; if that is more than it asked for, it is one of several in
    there. One that asks for none sees none, so that Triton finds none either.
    """
    there, given = visible_gpus(), "SLURM_JOB_ID" in os.environ
    if asked and (not there or (given and len(there) <= _gpus(asked, shares))):
        yield there
        return
    _refuse(asked, shares, len(there))
    taken = _wait_for(asked, shares, there, locks or _folder()) if asked else {}
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


def require_gpus(rule: str, asked: int, *, shares: int = 1) -> None:
    """An error unless torch can use the GPUs that a rule asked for: it would use the CPU instead.

    To be called once `gpus_taken` has said which: CUDA reads that once in a process.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of is in the error
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = _gpus(asked, shares)
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
    """What torch says when it is made to use a GPU, its first line."""
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return "it does not say why"


def driver_version() -> str | None:
    """Of NVIDIA's driver, as the kernel says or, where that is hidden, its own tool."""
    if DRIVER.is_file():
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", DRIVER.read_text())
        return found[0] if found else None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None  # no driver, or a container without its tool
    return said.split()[0] if said.split() else None


def limit_memory(fraction: float) -> None:
    """Keep this process to a part of the memory of its GPU: there are others beside it."""
    import torch

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
