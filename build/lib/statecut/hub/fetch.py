"""The download: files of the hub at pinned commits, each checked by its hash.

huggingface_hub resolves branches, lists files and transfers them. Its own `snapshot_download` is
not used, because it keeps nothing of a file whose process ends before the file is complete (1.33),
and compares only its size.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from reproduction.running.locks import exclusive_lock
from statecut.errors import InputError, nearest
from statecut.files import atomic_write, check_disk_space, check_writable, sha256
from statecut.hub.convert import convert, safe_name
from statecut.hub.downloads import (
    DEFAULT_PATTERNS,
    DOWNLOADS,
    Downloads,
    HubItem,
    Key,
    Pin,
    PinnedFile,
    merge_items,
)

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

logger = logging.getLogger(__name__)

# Code, and pickles that are not converted: never fetched, whatever the patterns say.
NEVER = (".py", ".pyc", ".pkl", ".pickle", ".pt", ".pth", ".ckpt")
WORKERS = 4  # transfers at the same time


def fetch(
    items: Iterable[HubItem],
    downloads: Downloads = DOWNLOADS,
    *,
    update: Sequence[str] = (),
    endpoint: str | None = None,
) -> dict[Key, str]:
    """Fetch what is missing, pin it in the lock file, and return why repositories failed.

    A locked repository keeps its commit, unless `update` names it. Files that are complete, or that
    the cache of huggingface_hub has, are checked by their hash and not fetched. HF_ENDPOINT,
    HF_TOKEN and a login apply. A repository that fails does not stop the others.
    """
    import httpx

    items = merge_items(items)
    for name in update:
        if name not in (known := {item.name for item in items}):
            raise InputError(
                f"cannot update {name}: not in the configuration{nearest(name, known)}"
            )
    check_writable(downloads.lock)
    check_writable(downloads.folder / "models" / "any")
    failures: dict[Key, str] = {}
    with exclusive_lock([downloads.folder / ".incoming"]):
        pins = downloads.pins()
        for item in items:
            pin = pins.get(item.key)
            try:
                repository = _Repository(item, downloads, endpoint)
                complete = repository.complete(pin, update=item.name in update)
                if complete != pin:
                    pins[item.key] = complete
                    downloads.write_pins(pins)
            except InputError as error:
                failures[item.key] = f"{item}: {error}"
            # ValueError: an answer that is no JSON, as a captive portal gives.
            except (OSError, ValueError, httpx.HTTPError) as error:
                failures[item.key] = f"{item}: {_reason(error)}"
    return failures


@dataclass(frozen=True)
class _Repository:
    item: HubItem
    downloads: Downloads
    endpoint: str | None

    def complete(self, pin: Pin | None, *, update: bool) -> Pin:
        """The pin, after all of its files are in place and checked."""
        item = self.item
        if pin is None or update:
            pin = self.pin(item.revision, item.patterns, pin)
        else:
            pin.check_revision(item)
            if not set(item.patterns) <= set(pin.patterns):
                patterns = tuple(sorted({*item.patterns, *pin.patterns}))
                pin = replace(self.pin(pin.commit, patterns, pin), revision=pin.revision)
        folder = self.downloads.path(item.key, pin.commit)
        missing = self.missing(pin, folder)
        if not missing:
            return pin
        arrivals = self.fetch(pin.commit, missing)
        placed = {file.path: _place(file, arrivals, folder) for file in missing}
        shutil.rmtree(arrivals.parent)  # also what a commit left that was given up
        return replace(pin, files=tuple(placed.get(file.path, file) for file in pin.files))

    def pin(self, revision: str, patterns: tuple[str, ...], known: Pin | None) -> Pin:
        """The commit of a revision and its files, as the hub lists them."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        api, name, kind = HfApi(endpoint=self.endpoint), self.item.name, self.item.kind
        commit = api.repo_info(name, repo_type=kind, revision=revision, timeout=30).sha
        if commit is None:
            raise InputError("the hub names no commit")
        listing = [
            PinnedFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
            for entry in api.list_repo_tree(name, recursive=True, revision=commit, repo_type=kind)
            if isinstance(entry, RepoFile)
        ]
        files = {
            file.path: file for file in _choose(replace(self.item, patterns=patterns), listing)
        }
        if known is not None and known.commit == commit:
            files |= {file.path: file for file in known.files if file.path in files}
        return Pin(revision, commit, patterns, tuple(files[path] for path in sorted(files)))

    def missing(self, pin: Pin, folder: Path) -> list[PinnedFile]:
        """The files that are absent or not what they must be."""
        missing = []
        with _progress_bar(f"{self.item.name} (checking)", pin.files) as bar:
            for file in pin.files:
                if not file.matches(folder / file.path):
                    missing.append(file)
                bar.update(file.size)
        return missing

    def fetch(self, commit: str, files: list[PinnedFile]) -> Path:
        """A folder that holds `files` as they are on the hub, complete and checked."""
        incoming = replace(self.downloads, folder=self.downloads.folder / ".incoming")
        arrivals = incoming.path(self.item.key, commit)
        originals = [file.source or file for file in files]
        for file in originals:
            self.prepare(commit, file, arrivals / file.path)
        have = sum(_size(arrivals / file.path) for file in originals)
        # Each conversion writes a second copy before the pickled file is deleted.
        copy = max((file.source.size for file in files if file.source), default=0)
        check_disk_space(arrivals, sum(file.size for file in originals) - have + copy)
        stop = threading.Event()
        with _progress_bar(self.item.name, originals, have) as bar:

            def arrive(file: PinnedFile) -> None:
                path = arrivals / file.path
                with _Transfer(path, bar, stop) as out:
                    self.transfer(commit, file, out)
                if not file.matches(path):
                    path.unlink()
                    raise InputError(
                        f"{file.path}: what arrived is not what the hub lists ({file.size} bytes, "
                        f"hash {file.digest}); it was deleted"
                    )

            with ThreadPoolExecutor(WORKERS) as pool:
                try:
                    list(pool.map(arrive, originals))
                finally:
                    stop.set()  # after a failure or Ctrl-C the other transfers end too
        return arrivals

    def prepare(self, commit: str, file: PinnedFile, path: Path) -> None:
        """Keep what an earlier download left at `path`, or take the file from the cache of
        huggingface_hub: as a link, or as a copy where the cache is on another disk."""
        from huggingface_hub import try_to_load_from_cache

        path.parent.mkdir(parents=True, exist_ok=True)
        if _size(path) > file.size:
            path.unlink()
        if _size(path) == file.size:
            return
        name, kind = self.item.name, self.item.kind
        cached = try_to_load_from_cache(name, file.path, revision=commit, repo_type=kind)
        if isinstance(cached, str) and file.matches(Path(cached)):
            path.unlink(missing_ok=True)
            try:
                os.link(Path(cached).resolve(), path)
            except OSError:
                shutil.copyfile(cached, path)

    def transfer(self, commit: str, file: PinnedFile, out: _Transfer) -> None:
        """Append what is missing; a connection that breaks is taken up again."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers, silent_tqdm

        name, kind = self.item.name, self.item.kind
        http_get(
            hf_hub_url(name, file.path, repo_type=kind, revision=commit, endpoint=self.endpoint),
            out,
            resume_size=out.tell(),
            # A range of a compressed answer would count other bytes than the file's.
            headers=build_hf_headers() | {"Accept-Encoding": "identity"},
            expected_size=file.size,
            tqdm_class=silent_tqdm,  # our bar is of all files together
        )
        out.flush()
        os.fsync(out.fileno())


class _Transfer(io.BufferedWriter):
    """A file that is appended to until `stop` is set, with a bar that counts its bytes."""

    def __init__(self, path: Path, bar: tqdm, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "a"))
        self.bar, self.stop = bar, stop

    def write(self, chunk: bytes) -> int:  # type: ignore[override]
        if self.stop.is_set():
            raise InterruptedError("another transfer failed")
        self.bar.update(len(chunk))
        return super().write(chunk)


def _choose(item: HubItem, listing: list[PinnedFile]) -> list[PinnedFile]:
    """The listed files that the patterns match and that may be fetched."""
    allowed = [file for file in listing if PurePosixPath(file.path).suffix.lower() not in NEVER]
    if item.kind == "model":
        allowed = [
            file
            for file in allowed
            if "/" not in file.path
            and (not file.path.endswith(".bin") or safe_name(file.path) != file.path)
        ]
    chosen: dict[str, PinnedFile] = {}
    for pattern in item.patterns:
        matching = {file.path: file for file in allowed if fnmatchcase(file.path, pattern)}
        if not matching and pattern not in DEFAULT_PATTERNS[item.kind]:
            raise InputError(f"nothing that may be fetched matches the pattern {pattern!r}")
        chosen |= matching
    if item.kind == "dataset":
        return list(chosen.values())

    safe = any(fnmatchcase(path, "model*.safetensors") for path in chosen)
    pickled = any(path.endswith(".bin") for path in chosen)
    if not safe and not pickled and set(DEFAULT_PATTERNS["model"]) <= set(item.patterns):
        raise InputError("has no weights: neither model*.safetensors nor pytorch_model*.bin")
    files = []
    for file in chosen.values():
        if (name := safe_name(file.path)) == file.path:
            files.append(file)
        elif not safe:
            files.append(PinnedFile(name, 0, "", source=file))
    return files


def _place(file: PinnedFile, arrivals: Path, folder: Path) -> PinnedFile:
    """Move a file to its place, converted where it is pickled."""
    target = folder / file.path
    if file.source is None:
        target.parent.mkdir(parents=True, exist_ok=True)
        (arrivals / file.path).replace(target)
        return file.with_sha256(target)
    pickled = arrivals / file.source.path
    logger.info("converting %s to %s", pickled.name, target.name)
    with atomic_write(target, force=True) as aside:
        try:
            convert(pickled, aside)
        except InputError:
            pickled.unlink()
            raise
        source = file.source.with_sha256(pickled)
        converted = PinnedFile(file.path, aside.stat().st_size, sha256(aside), source)
        if file.digest and file.digest != converted.digest:
            raise InputError(
                f"{file.path}: converted again it has the sha256 {converted.digest}, the lock says "
                f"{file.digest}; other versions of torch or safetensors may have made it"
            )
    pickled.unlink()
    return converted


def _reason(error: Exception) -> str:
    """An error of the network, the hub or the disk in one line; huggingface_hub says what to do."""
    import httpx

    message = " ".join(str(error).split())
    if isinstance(error, httpx.TransportError):
        return f"offline: the hub cannot be reached ({message})"
    return f"{type(error).__name__}: {message}"


def _progress_bar(label: str, files: Sequence[PinnedFile], done: int = 0) -> tqdm:
    """A bar of bytes, from five seconds on; in a log file a line every ten."""
    from huggingface_hub.utils import tqdm

    return tqdm(
        desc=label,
        initial=done,
        total=sum(file.size for file in files),
        unit="B",
        unit_scale=True,
        delay=5,
        mininterval=0.5 if sys.stderr.isatty() else 10,
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
