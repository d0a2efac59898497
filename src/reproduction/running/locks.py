"""One job at a time on an output.

A cluster that loses contact to a node starts its jobs again elsewhere, while those on the node may
go on; so may the jobs of a Snakemake that was killed. The second job waits here for the first.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

# Errors of a file system that has no locks, or none between machines.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def exclusive_lock(outputs: Sequence[Path | str]) -> Iterator[bool]:
    """Keep every other job off these outputs for the length of a block.

    Yields whether it had to wait for another job, which may have built them. The lock ends with its
    process, however that ends.
    """
    if not outputs:
        yield False
        return
    first = Path(outputs[0])
    path = first.with_name(f".{first.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file, waited = _lock(path)
    try:
        yield waited
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _lock(path: Path) -> tuple[int, bool]:
    """An open file that is locked, and whether another process held the lock."""
    waited = False
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        waited |= _wait_for(file, path)
        # The holder unlinks the file at its end: then the lock is on a file that nobody else sees.
        if _is_at(path, file):
            os.truncate(file, 0)
            os.write(file, _this_job().encode())
            return file, waited
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one at a path, where others may be put or removed at any time."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError as error:
        # A file that another machine removed is stale on NFS.
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
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
        logger.warning(f"{path.parent} has no locks: {error.strerror}")
        return False
    holder = os.pread(file, 200, 0).decode() or "another job"
    logger.info(f"{path}: waiting for {holder}, which builds the same")
    fcntl.flock(file, fcntl.LOCK_EX)
    return True


def _this_job() -> str:
    """For the message of a job that waits."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {os.uname().nodename}" + (f", Slurm job {job}" if job else "")
