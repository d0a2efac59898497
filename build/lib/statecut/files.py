"""Files that are written completely or not at all, and their digests."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statecut.errors import InputError

logger = logging.getLogger(__name__)

DIGEST_CACHE = Path(".snakemake/statecut/digests.json")
"""Digests of files that users bring: they may be large, and every start of Snakemake needs them."""
ANNOUNCE_FROM = 5_000_000_000  # bytes that take long enough to read to be announced


def sha256(path: Path | str) -> str:
    """The hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(paths: Iterable[Path | str], cache: Path = DIGEST_CACHE) -> dict[str, str]:
    """The digests of many files. Only those are read whose size or time changed since the last
    call: a touched or copied file is read once more, and has the same digest."""
    known = read_json(cache) if cache.is_file() else {}
    status = {str(path): os.stat(path) for path in paths}
    seen = {path: [stat.st_size, stat.st_mtime_ns] for path, stat in status.items()}
    new = [path for path in seen if known.get(path, {}).get("seen") != seen[path]]
    if (size := sum(status[path].st_size for path in new)) > ANNOUNCE_FROM:
        logger.info(f"reading {len(new)} new or changed files, {size / 1e9:.1f} GB")
    try:
        for path in new:
            known[path] = {"seen": seen[path], "sha256": sha256(path)}
    finally:  # what was read before an interruption is kept
        if new:
            write_json(cache, known)
    return {path: str(known[path]["sha256"]) for path in seen}


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
    except PermissionError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def to_json(value: Any) -> str:
    """JSON for people: indented, sorted, with a line break at the end."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path | str, value: Any) -> None:
    with atomic_write(path, force=True) as temporary:
        temporary.write_text(to_json(value))


def existing_parent(path: Path) -> Path:
    """The folder that a path is in, or the nearest above it that exists."""
    return next(folder for folder in (path.parent, *path.parents) if folder.exists())


def check_writable(path: Path | str, *, folder: bool = False) -> Path:
    """The path itself, or an error before any work if no file, or no folder, can be written there:
    a file never takes the place of a folder, nor a folder that of a file."""
    path = Path(path)
    if path.is_dir() and not folder:
        raise InputError(f"{path} is a folder: give the name of a file")
    if folder and os.path.lexists(path) and not path.is_dir():  # a link to nowhere, too
        raise InputError(f"{path} is no folder: give another name")
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
    empty folder may be."""
    path = check_writable(path, folder=folder)
    if folder and path.exists() and (path.samefile(".") or path.is_mount()):
        raise InputError(
            f"{path} is the working folder or a mount point, and cannot be replaced: give a folder "
            "in it"
        )
    if path.exists() and not force and not is_empty_folder(path):
        raise InputError(f"{path} exists already; give --force to replace it")
    return path


def is_empty_folder(path: Path) -> bool:
    """Nothing is lost with it. A link to one is not: no folder is renamed to a link."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def check_not_overwriting(out: Path, sources: Iterable[Path], *, kind: str, mark: str) -> None:
    """With --force a folder replaces one of its kind, which has a file called `mark`, or an empty
    one, and nothing else; least of all what it is made from. Checked first: what --force does not
    replace is no reason to advise it."""
    target = out.resolve()
    for source in sources:
        if target in (source.resolve(), *source.resolve().parents):
            raise InputError(f"{out}: {source} would be lost; give another folder")
    if out.exists() and not (out / mark).is_file() and not is_empty_folder(out):
        raise InputError(
            f"{out} exists and is no {kind}, and --force replaces only those: give another folder"
        )


def is_full_disk(error: BaseException) -> bool:
    """By the message: libraries that are not written in Python have exceptions of their own."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def check_disk_space(path: Path, size: int) -> None:
    """An error if the disk has less than `size` bytes free; a quota shows only when it is hit."""
    free = shutil.disk_usage(existing_parent(path)).free
    if size > free:
        raise InputError(
            f"{path} needs {size:,} bytes, and its disk has {free:,} left: make room, or give "
            "another place"
        )


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
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        _flush(temporary)
    except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    _move(temporary, path, force=force)
    shutil.rmtree(parent, ignore_errors=True)


def _move(temporary: Path, path: Path, *, force: bool) -> None:
    """Rename `temporary` to `path`. If that fails, `path` is as it was, and nothing is deleted."""
    replaced = temporary.with_name(f"{temporary.name}.replaced")
    try:
        if force and path.is_dir():
            # A folder cannot be renamed over a full one: move the old one away first. Without
            # `force` it was empty, and is not touched if it no longer is.
            path.rename(replaced)
        temporary.replace(path)
    except BaseException as error:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        if not isinstance(error, OSError):
            raise
        raise InputError(
            f"{path} cannot be put in place: {error}; it is finished, and kept as {temporary}"
        ) from None


def _flush(path: Path) -> None:
    """Force the bytes to the disk: a rename must not survive a crash that its data does not."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
