"""One job at a time on an output.

A cluster that has lost sight of a node starts its jobs again elsewhere, while those on it may live
on; so may the jobs of a Snakemake that was killed. The second job waits here for the first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# What a file system says that has no locks, or none between machines.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def exclusive_lock(outputs: Sequence[Path | str]) -> Iterator[bool]:
    """Keep every other job off these outputs for the length of a block.

    Gives whether another one had to be waited for: then its outputs may be there.
    The lock ends with its process, however that ends.
    """
    if not outputs:
        yield False
        return
    first = Path(outputs[0])
    path = first.with_name(f".{first.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file, waited = _locked(path)
    try:
        yield waited
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """One process after another in a block that is short; in no order where there are no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def _locked(path: Path) -> tuple[int, bool]:
    """An open file that is locked, and whether another process had it."""
    waited = False
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        waited |= _wait_for(file, path)
        # Whoever had it has unlinked it at the end: then this one is locked in vain.
        if _is_at(path, file):
            os.truncate(file, 0)
            os.write(file, _me().encode())
            return file, waited
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one at a path, where others may be put or removed at any time."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _wait_for(file: int, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"keycut: {path.parent} has no locks: {error.strerror}", file=sys.stderr, flush=True)
        return False
    holder = os.pread(file, 200, 0).decode() or "another job"
    print(
        f"keycut: {path}: waiting for {holder}, which makes the same", file=sys.stderr, flush=True
    )
    fcntl.flock(file, fcntl.LOCK_EX)
    return True


def _me() -> str:
    """This job in words, for the one that waits."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {os.uname().nodename}" + (f", Slurm job {job}" if job else "")
