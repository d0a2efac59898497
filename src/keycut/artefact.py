"""Artefacts: written whole or not at all, and known by their digest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keycut.errors import InputError


def sha256(path: Path | str) -> str:
    """The hex digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def json_text(value: Any) -> str:
    """JSON for people: indented, sorted, ending with a line."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path | str, value: Any) -> None:
    with whole(path, force=True) as aside:
        aside.write_text(json_text(value))


def refuse_unwritable(path: Path | str) -> Path:
    """The path itself, or an error now, before any work, if nothing can be written there."""
    path = Path(path)
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    # A real attempt: mode bits say nothing of a read-only mount, or of what root may do.
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written: {folder}: {error.strerror}") from None
    return path


def refuse_out(path: Path | str, *, force: bool) -> Path:
    """The path itself, or an error now if it exists and may not be replaced, or be written."""
    if Path(path).exists() and not force:
        raise InputError(f"{path} exists already; give --force to replace it")
    return refuse_unwritable(path)


def refuse_to_lose(out: Path, sources: Iterable[Path], *, kind: str, mark: str) -> None:
    """With --force a folder takes the place of one of its kind, which has a file called `mark` in
    it, and of nothing else; least of all of what it is made from."""
    target = out.resolve()
    for source in sources:
        if target in (source.resolve(), *source.resolve().parents):
            raise InputError(f"{out}: {source} would be lost; give another folder")
    if out.exists() and not (out / mark).is_file():
        raise InputError(f"{out} is no {kind}: --force replaces only those")


@contextmanager
def whole(path: Path | str, *, force: bool = False, folder: bool = False) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it to `path` when the block ends well.

    A reader never sees half of it, and a failed block leaves `path` as it was. `folder` makes the
    path aside a directory. An existing `path` is refused unless `force` is given.
    """
    path = refuse_out(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    inside = aside / path.name
    try:
        if folder:
            inside.mkdir()
        yield inside
        _flush(inside)
        if path.is_dir():
            # A folder cannot be renamed over a full one: move the old one aside first.
            path.rename(aside / "replaced")
        inside.replace(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    """Force the bytes to the disk: a rename that survives a crash must not outlive its data."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
