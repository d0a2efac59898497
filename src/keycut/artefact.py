"""Artefacts: written whole or not at all, and known by their digest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keycut.errors import InputError

DIGEST_CACHE = Path(".snakemake/keycut/digests.json")
"""Digests of files that users bring: they may be large, and every start of Snakemake asks."""
ANNOUNCE_FROM = 5_000_000_000  # bytes: whoever waits shall know for what


def sha256(path: Path | str) -> str:
    """The hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(paths: Iterable[Path | str], cache: Path = DIGEST_CACHE) -> dict[str, str]:
    """The same of many, each read only where its size and time are not those of when it was read
    last.

    A touched or copied file is read once more, and has the same digest.
    """
    known = read_json(cache) if cache.is_file() else {}
    status = {str(path): os.stat(path) for path in paths}
    seen = {path: [found.st_size, found.st_mtime_ns] for path, found in status.items()}
    new = [path for path in seen if known.get(path, {}).get("seen") != seen[path]]
    if (size := sum(status[path].st_size for path in new)) > ANNOUNCE_FROM:
        said = f"keycut: reading {len(new)} new or changed files, {size / 1e9:.1f} GB"
        print(said, file=sys.stderr, flush=True)
    try:
        for path in new:
            known[path] = {"seen": seen[path], "sha256": sha256(path)}
    finally:  # who interrupts it need not wait for all of them once more
        if new:
            write_json(cache, known)
    return {path: str(known[path]["sha256"]) for path in seen}


def canonical_json(value: Any) -> str:
    """Sorted keys and no free choice of spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """The hex digest of a JSON value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def read_json(path: Path | str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


def to_json(value: Any) -> str:
    """JSON for people: indented, sorted, ending with a line."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path | str, value: Any) -> None:
    with atomic_write(path, force=True) as aside:
        aside.write_text(to_json(value))


def existing_parent(path: Path) -> Path:
    """The folder that it will be in, or the nearest above that is there."""
    return next(folder for folder in (path.parent, *path.parents) if folder.exists())


def check_writable(path: Path | str) -> Path:
    """The path itself, or an error now, before any work, if nothing can be written there."""
    path = Path(path)
    folder = existing_parent(path)
    # A real attempt: mode bits say nothing of a read-only mount, or of what root may do.
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written: {folder}: {error.strerror}") from None
    return path


def check_output_path(path: Path | str, *, force: bool) -> Path:
    """The path itself, or an error now if it exists and may not be replaced, or be written."""
    if Path(path).exists() and not force:
        raise InputError(f"{path} exists already; give --force to replace it")
    return check_writable(path)


def check_not_overwriting(out: Path, sources: Iterable[Path], *, kind: str, mark: str) -> None:
    """With --force a folder takes the place of one of its kind, which has a file called `mark` in
    it, and of nothing else; least of all of what it is made from."""
    target = out.resolve()
    for source in sources:
        if target in (source.resolve(), *source.resolve().parents):
            raise InputError(f"{out}: {source} would be lost; give another folder")
    if out.exists() and not (out / mark).is_file():
        raise InputError(f"{out} is no {kind}: --force replaces only those")


def is_full_disk(error: BaseException) -> bool:
    """Libraries that are not written in Python have exceptions of their own for it."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def check_disk_space(path: Path, size: int) -> None:
    """An error now if the disk has no room for so many bytes; a quota shows itself only later."""
    free = shutil.disk_usage(existing_parent(path)).free
    if size > free:
        raise InputError(
            f"{path} needs {size:,} bytes, and its disk has {free:,} left: make room, or give "
            "another place"
        )


@contextmanager
def explain_full_disk(place: Path | str) -> Iterator[None]:
    """A disk that is full after all is an error in one line."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise InputError(f"{place}: {error}: make room and start again") from None


@contextmanager
def atomic_write(path: Path | str, *, force: bool = False, folder: bool = False) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it to `path` when the block ends well.

    A reader never sees half of it, and a failed block leaves `path` as it was; so does a failed
    rename, which leaves what was made aside. `folder` makes the path aside a directory. An existing
    `path` is refused unless `force` is given.
    """
    path = check_output_path(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    inside = aside / path.name
    try:
        if folder:
            inside.mkdir()
        yield inside
        _flush(inside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _put_in_place(inside, path)
    shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(made: Path, path: Path) -> None:
    """Rename `made` to `path`. If that fails, `path` is as it was, and `made` is not deleted."""
    replaced = made.with_name(f"{made.name}.replaced")
    try:
        if path.is_dir():
            # A folder cannot be renamed over a full one: move the old one aside first.
            path.rename(replaced)
        made.replace(path)
    except BaseException as error:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        if not isinstance(error, OSError):
            raise
        raise InputError(
            f"{path} cannot be put in place: {error}; it is finished, and lies in {made}"
        ) from None


def _flush(path: Path) -> None:
    """Force the bytes to the disk: a rename that survives a crash must not outlive its data."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
