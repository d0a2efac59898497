"""Checkpoints of a run: complete or absent, verified when read, the last two kept.

The name of a run's folder is the digest of what defines it (run.json): started again with the same
settings it goes on, with others it begins anew. A checkpoint is written aside, flushed to the disk
and then renamed, so that a process killed at any moment, or a full disk, leaves the one before.
Beside them are the lock of the process that trains, and the loss curve as it grows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from statecut.errors import InputError
from statecut.files import (
    atomic_write,
    check_writable,
    digest,
    flush,
    read_json,
    sha256,
    write_json,
)

logger = logging.getLogger(__name__)

KEPT = 2
TENSORS = "tensors.safetensors"
CURVE = "loss.csv"
MANIFEST = "manifest.json"  # of a folder: the sha256 of every other file in it, by name

# What reading a damaged checkpoint can raise.
DAMAGE = (InputError, OSError, SafetensorError)


class Checkpoints:
    """The checkpoints of one run. A context: inside it no other process can use the same ones."""

    def __init__(self, root: Path | str, run: Mapping[str, Any]) -> None:
        self.run = dict(run)
        self.folder = Path(root) / digest(self.run)[:16]
        self.curve = self.folder / CURVE
        check_writable(self.folder / MANIFEST)
        self.lock: int | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise InputError(
                f"{self.folder}: another process trains this run; wait for it or end it"
            ) from None
        except OSError as error:  # some cluster file systems have no locks
            logger.warning(
                f"{self.folder} cannot be locked ({error.strerror}): start the run only once"
            )
        # What a killed process was writing.
        for left in self.folder.glob(".*"):
            if left.is_dir():  # and not a file that NFS keeps for whoever has it open
                shutil.rmtree(left)
        write_json(self.folder / "run.json", self.run)
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint of a step; the loss curve up to there reaches the disk first."""
        path = self.folder / f"step-{step:08d}"
        try:
            flush(self.curve)
            with atomic_write(path, folder=True, force=True) as aside:
                save_file(dict(tensors), aside / TENSORS)
                seal(aside)
            flush(self.folder)  # the rename
        except (OSError, SafetensorError) as error:
            kept = self._saved()
            before = f"the one in {kept[-1].name} is kept" if kept else "there is none before it"
            raise InputError(
                f"{path}: the checkpoint could not be written ({error}); {before}: fix that and "
                "start the same command again"
            ) from None
        # Later ones were damaged and skipped, or this step would not have come again.
        older = [saved for saved in self._saved() if saved <= path]
        for saved in set(self._saved()) - set(older[-KEPT:]):
            shutil.rmtree(saved)

    def latest(self) -> dict[str, Tensor] | None:
        """The last one that is complete. Damaged ones are skipped, with a warning."""
        for path in reversed(self._saved()):
            try:
                verify(path)
                return load_file(path / TENSORS)
            except DAMAGE as error:
                logger.warning(f"{path.name} is skipped: {error}")
        return None

    def remove(self) -> None:
        """Remove the folder, once the result is written."""
        self.__exit__()  # NFS keeps a file that is open, and with it the folder
        shutil.rmtree(self.folder)

    def held(self) -> int:
        """The descriptor of the lock file, for child processes to hold too."""
        assert self.lock is not None, "outside the context there is none"
        return self.lock

    def _saved(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def seal(folder: Path) -> None:
    """Write the manifest of a finished folder."""
    write_json(folder / MANIFEST, {name: sha256(folder / name) for name in _inside(folder)})


def verify(folder: Path) -> None:
    """An error unless a folder holds what its manifest says."""
    manifest = read_json(folder / MANIFEST)
    if manifest.keys() != _inside(folder):
        raise InputError(f"{folder / MANIFEST} does not list what is there")
    for name, expected in manifest.items():
        if sha256(folder / name) != expected:
            raise InputError(f"{folder / name} is damaged: its sha256 is not the manifest's")


def _inside(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {MANIFEST}
