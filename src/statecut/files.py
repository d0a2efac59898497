"""Files that are written completely or not at all, and their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statecut.errors import InputError


def sha256(path: Path | str) -> str:
    """The hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Sorted keys and no spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """The hex digest of a JSON value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def read_json(path: Path | str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def to_json(value: Any) -> str:
    """Indented, for people."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path | str, value: Any) -> None:
    with atomic_write(path, force=True) as temporary:
        temporary.write_text(to_json(value))


def existing_parent(path: Path) -> Path:
    """The folder that a path is in, or the nearest above it that exists."""
    return next(folder for folder in (path.parent, *path.parents) if folder.exists())


def check_writable(path: Path | str, *, folder: bool = False) -> Path:
    """The path itself, or an error before any work if no file, or no folder, can be written there:
    neither takes the place of the other."""
    path = Path(path)
    if os.path.lexists(path) and path.is_dir() != folder:  # a link to nowhere is not a folder
        raise InputError(f"{path} is {'not a' if folder else 'a'} folder: give another name")
    parent = existing_parent(path)
    # A real attempt: mode bits do not show a read-only mount, or what root may do.
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written: {parent}: {error.strerror}") from None
    return path


def check_output_path(path: Path | str, *, force: bool, folder: bool = False) -> Path:
    """The path itself, or an error if it exists and may not be replaced, or cannot be written. An
    empty folder may be replaced."""
    path = check_writable(path, folder=folder)
    if folder and path.exists() and (path.samefile(".") or path.is_mount()):
        raise InputError(f"{path} is the working folder or a mount point: give a folder in it")
    if path.exists() and not force and not _is_empty_folder(path):
        raise InputError(
            f"{path} exists already; give --force to replace it (from Python: force=True)"
        )
    return path


def _is_empty_folder(path: Path) -> bool:
    """Nothing is lost with it. A link to one is not: no folder is renamed to a link."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def check_not_overwriting(out: Path, sources: Iterable[Path], *, kind: str, marks: str) -> None:
    """With --force a folder replaces one of its kind, which has files that match each of `marks`,
    or an empty one; never what it is made from."""
    target = out.resolve()
    for source in sources:
        if target in (source.resolve(), *source.resolve().parents):
            raise InputError(f"{out}: {source} would be lost; give another folder")
    own_kind = all(any(out.glob(mark)) for mark in marks.split())
    if out.exists() and not own_kind and not _is_empty_folder(out):
        raise InputError(
            f"{out} exists and is not a {kind} directory; --force only replaces {kind} directories"
        )


def check_disk_space(path: Path, size: int) -> None:
    """An error if the disk has less than `size` bytes free; a quota shows only when it is hit."""
    free = shutil.disk_usage(existing_parent(path)).free
    if size > free:
        raise InputError(f"{path} needs {size:,} bytes, and its disk has {free:,} left: make room")


def is_full_disk(error: BaseException) -> bool:
    """By the message: libraries that are not written in Python have exceptions of their own."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


@contextmanager
def explain_full_disk(place: Path | str) -> Iterator[None]:
    """A disk that fills up in the block is an error in one line."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise InputError(f"{place}: {error}: make room and start again") from None


@contextmanager
def atomic_write(path: Path | str, *, force: bool = False, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` when the block ends well.

    A reader never sees half of it, and a failed block leaves `path` as it was; so does a failed
    rename, which keeps the temporary one. With `folder` the temporary path is a directory. An
    existing `path` is an error unless `force` is given, or it is an empty folder.
    """
    path = check_output_path(path, force=force, folder=folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    parent = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    temporary = parent / path.name
    os.umask(umask := os.umask(0o077))
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        # A rename must not survive a crash that its data does not.
        for file in temporary.rglob("*") if folder else [temporary]:
            # A symlink may lead nowhere from here, and a hard link is another model's file.
            if file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1:
                file.chmod(0o666 & ~umask)  # safetensors writes files that only their owner reads
                flush(file)
    except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    replaced = parent / f"{path.name}.replaced"
    try:
        if force and path.is_dir():  # a folder cannot be renamed over a full one
            path.rename(replaced)
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be put in place: {error}; it is finished, and kept as {temporary}"
        ) from None
    finally:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
    shutil.rmtree(parent, ignore_errors=True)


def flush(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
