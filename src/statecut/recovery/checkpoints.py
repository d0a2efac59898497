"""What a run leaves: its model in the end, and until then a checkpoint to go on from.

The name of a run's folder is the digest of what defines it (run.json): started again with the same
settings it goes on, with others it begins anew. A checkpoint is written aside, flushed to the disk
and then renamed over the one before, so that a process killed at any moment, or a full disk, leaves
that one. Beside it are the lock of the process that trains, and the loss curve as it grows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.files import (
    atomic_write,
    check_output_path,
    check_writable,
    digest,
    flush,
    write_json,
)
from statecut.models.checkpoint import save
from statecut.version import __version__

logger = logging.getLogger(__name__)

CURVE = "loss.csv"


class Finished(Exception):
    """Another process, for which this one has waited, wrote the result of the same run."""


class Checkpoints:
    """The folder of one run. A context: inside it no other process can use the same one."""

    def __init__(self, root: Path | str, run: Mapping[str, Any], *, wait: bool = False) -> None:
        self.run, self.wait = dict(run), wait
        self.folder = Path(root) / digest(self.run)[:16]
        self.curve, self.file = self.folder / CURVE, self.folder / "last.safetensors"
        self.lock_file = self.folder / "lock"
        check_writable(self.file)
        self.done = False  # the result is written: the folder is removed

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.lock_file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._blocked()
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

    def _blocked(self) -> None:
        """Until the process that trains this run ends: then it is ours, or finished."""
        if not self.wait:
            os.close(self.lock)
            raise InputError(
                f"{self.folder}: another process trains this run; wait for it or end it"
            )
        logger.info(f"{self.folder}: another process trains this run, and this one waits for it")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        if not self.lock_file.exists():
            os.close(self.lock)
            raise Finished

    def __exit__(self, *error: object) -> None:
        if self.done:
            self.lock_file.unlink()  # tells a process that waits
        os.close(self.lock)  # first: NFS keeps a file that is open, and with it the folder
        if self.done:
            shutil.rmtree(self.folder)

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint; the loss curve up to there reaches the disk first."""
        try:
            flush(self.curve)
            with atomic_write(self.file, force=True) as aside:
                save_file(dict(tensors), aside)
            flush(self.folder)  # the rename
        except (OSError, SafetensorError) as error:
            before = "the one before is kept" if self.file.exists() else "there is none before it"
            raise InputError(
                f"{self.file}: the checkpoint could not be written ({error}); {before}: fix that "
                "and start the same command again"
            ) from None

    def last(self) -> dict[str, Tensor] | None:
        if not self.file.exists():
            return None
        try:
            return load_file(self.file)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{self.file} cannot be read ({error}): delete {self.folder} to begin anew"
            ) from None


@dataclass(frozen=True)
class Output:
    """The folder of a trained model, and how its run survives until that is written."""

    folder: Path | str
    checkpoints: Path | str  # where all running jobs keep theirs
    tokenizer: Path | str | None = None  # a folder to copy its files from
    files: Callable[[Path], Mapping[str, str]] = lambda folder: {}
    """Texts to put beside the model, which is in this folder by then."""
    save_seconds: float = 600.0  # between two checkpoints
    force: bool = False  # replace the folder if it exists
    links: bool = False  # a file in which nothing is trained is a hard link to the one before
    version: int = 1  # of the code: with another one a run begins anew
    wait: bool = False  # for a process that trains the same, which is an error otherwise

    def check(self) -> None:
        check_output_path(self.folder, force=self.force, folder=True)

    def checkpoints_of(self, work: str, data: PackedTokens, **defining: Any) -> Checkpoints:
        """Those of one run, which is identified by all that defines it."""
        text = {"sha256": data.manifest.sha256, "sequences": len(data)}
        run = {"work": work, **defining, "data": text, "version": self.version}
        return Checkpoints(self.checkpoints, {**run, "statecut": __version__}, wait=self.wait)

    def write(self, model: Any, checkpoints: Checkpoints, files: Iterable[Path] = ()) -> None:
        """The model with the loss curve and other files beside it."""
        with self.written(checkpoints, files) as aside:
            save(model, aside, tokenizer=self.tokenizer, force=True)

    @contextmanager
    def written(self, checkpoints: Checkpoints, files: Iterable[Path] = ()) -> Iterator[Path]:
        """A folder to put the model into, which then gets its place."""
        with atomic_write(self.folder, folder=True, force=self.force) as aside:
            yield aside
            for name, text in self.files(aside).items():
                (aside / name).write_text(text)
            for path in (checkpoints.curve, *files):
                shutil.copyfile(path, aside / path.name)
        checkpoints.done = True
