"""The one door to the outside: hub models and data sets, at pinned commits, checked by hash.

`download` runs once on a machine with a network. `resolve` is what every job calls, and needs
none. Between them stands the lock: for each item the commit that its branch was resolved to, and
what every file of it must be.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

from keycut.artefact import atomic_write, check_writable, read_json, sha256, write_json
from keycut.errors import InputError, nearest

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import tqdm

Kind = Literal["model", "dataset"]

# Below the checkout: what was fetched, and what it was.
DOWNLOADS = Path("data/hub")
LOCK = Path("config/revisions.lock")

# What is fetched where an item names no patterns. A `*` matches across folders, as in the hub's
# own client, but of a model only the files at the root count: that is all a loader reads.
DEFAULT_PATTERNS: dict[str, tuple[str, ...]] = {
    "model": (
        "*.jinja",
        "*.json",
        "*.model",
        "*.txt",
        "model-?????-of-?????.safetensors",
        "model.safetensors",
        "pytorch_model-?????-of-?????.bin",
        "pytorch_model.bin",
    ),
    "dataset": ("*",),
}
# Code, and pickles that nothing here converts: never fetched, whatever the patterns say.
NEVER = (".py", ".pyc", ".pkl", ".pickle", ".pt", ".pth", ".ckpt")
# Transfers and hashes that run side by side.
WORKERS = 4
# Files of at least this many bytes come by our own transfer, smaller ones by the hub's client.
# That one (1.33) keeps nothing of a file that was cut off: each attempt has a temporary file of its
# own. Ours goes on, and gives up xet for it, which is faster but starts again from zero too.
LARGE = 32 << 20


@dataclass(frozen=True)
class HubItem:
    """A model or a data set on the hub, and which of its files are needed (none: the default)."""

    kind: Kind
    name: str
    revision: str = "main"
    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f"kind {self.kind!r} of {self.name}: must be 'model' or 'dataset'")
        if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.name, re.ASCII):
            raise InputError(f"{self.kind} {self.name!r}: must have the form 'owner/name'")

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class _File:
    """What a file must be. Its path is relative to the item's folder.

    The digest is a sha256, or git's own hash of a small file (40 digits) as long as the hub's
    listing is all that is known, or empty for a converted file that has not been made yet.
    """

    path: str
    size: int
    digest: str
    source: _File | None = None  # the hub's pickled file, where this one was converted from it

    def __post_init__(self) -> None:
        if ".." in PurePosixPath(self.path).parts or PurePosixPath(self.path).is_absolute():
            raise InputError(f"file {self.path!r} would lie outside of its folder")

    @property
    def on_hub(self) -> _File:
        return self.source or self

    def matches(self, file: Path) -> bool:
        """Size first: most of what is wrong costs no reading."""
        if not self.digest or not file.is_file() or file.stat().st_size != self.size:
            return False
        return (sha256(file) if len(self.digest) == 64 else _git_hash(file)) == self.digest


@dataclass(frozen=True)
class _Pin:
    """One item of the lock."""

    revision: str
    commit: str
    patterns: tuple[str, ...]
    files: tuple[_File, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{40}", self.commit):
            raise InputError(f"commit {self.commit!r}: must be 40 hexadecimal digits")


_Lock = dict[tuple[str, str], _Pin]


def download(
    items: Iterable[HubItem],
    folder: Path | str,
    lock_path: Path | str,
    *,
    update: Sequence[str] = (),
    endpoint: str | None = None,
) -> None:
    """`fetch`, and one InputError at its end that says what failed, and why."""
    items = united(items)
    failures = fetch(items, folder, lock_path, update=update, endpoint=endpoint)
    if failures:
        raise InputError(
            f"{len(failures)} of {len(items)} items could not be downloaded "
            f"({GO_ON}):\n  " + "\n  ".join(failures.values())
        )


GO_ON = "run the same command again to go on from here"


def fetch(
    items: Iterable[HubItem],
    folder: Path | str,
    lock_path: Path | str,
    *,
    update: Sequence[str] = (),
    endpoint: str | None = None,
) -> dict[tuple[str, str], str]:
    """Fetch what is missing into FOLDER/<kind>s/<owner>--<name>/<commit>/ and pin it in the lock.

    A locked item keeps its commit, unless `update` names it. What is there already is checked by
    its hash and not fetched again; nor is what the cache of the hub's client has. HF_ENDPOINT,
    HF_TOKEN and a login count as they do for that client. An item that fails does not stop the
    others: what is returned says why, by kind and name.
    """
    import httpx

    folder, lock_path = Path(folder), Path(lock_path)
    items = united(items)
    for name in update:
        if name not in (known := {item.name for item in items}):
            raise InputError(
                f"cannot update {name}: not in the configuration{nearest(name, known)}"
            )
    check_writable(lock_path)
    check_writable(folder / "models" / "any")
    lock = _read_lock(lock_path)
    failures: dict[tuple[str, str], str] = {}
    with _alone(folder):
        for item in items:
            key = (item.kind, item.name)
            try:
                pin = _complete(item, lock.get(key), folder, item.name in update, endpoint)
                if pin != lock.get(key):
                    lock[key] = pin
                    _write_lock(lock_path, lock)
            except InputError as error:
                failures[key] = f"{item}: {error}"
            # ValueError: an answer that is no JSON, as a captive portal gives.
            except (OSError, ValueError, httpx.HTTPError) as error:
                failures[key] = f"{item}: {_reason(error)}"
    return failures


def locked_commits(lock_path: Path | str = LOCK) -> dict[tuple[str, str], str]:
    """The commit of everything that was downloaded, by its kind and name."""
    return {item: pin.commit for item, pin in _read_lock(Path(lock_path)).items()}


def resolve(
    name: str,
    kind: Kind,
    folder: Path | str,
    lock_path: Path | str,
    *,
    revision: str | None = None,
    patterns: Sequence[str] | None = None,
    verify: bool = False,
) -> Path:
    """The local folder of a locked item, without any network.

    Every file must be there with its locked size, and with `verify` also with its hash. `revision`
    and `patterns`, where given, must be what was locked: a configuration that was changed since is
    refused rather than ignored.
    """
    item = HubItem(kind, name, revision or "main")
    what = f"--model {name}" if kind == "model" else "--configfile FILE"
    again = f"run `keycut download {what}` on a machine with a network"
    pin = _read_lock(Path(lock_path)).get((kind, name))
    if pin is None:
        raise InputError(f"{item} is not in {lock_path}: {again}")
    if revision is not None:
        _refuse_other_revision(item, pin)
    if patterns is not None:
        new = sorted({*(patterns or DEFAULT_PATTERNS[kind])} - {*pin.patterns})
        if new:
            raise InputError(f"{item}: its files {', '.join(new)} are not in {lock_path}: {again}")
    home = _home(Path(folder), item, pin.commit)
    for file in pin.files:
        path = home / file.path
        if not path.is_file():
            raise InputError(f"{item}: {path} is missing: {again}")
        if (size := path.stat().st_size) != file.size:
            raise InputError(
                f"{item}: {path} has {size} bytes, {lock_path} says {file.size}: {again}"
            )
        if verify and not file.matches(path):
            raise InputError(f"{item}: {path} has not the sha256 of {lock_path}: {again}")
    return home


def downloaded(
    name: str, kind: Kind, folder: Path | str, lock_path: Path | str, *, revision: str
) -> Path | None:
    """The folder of an item that is locked at this revision, without a look at its files; None if
    that was never downloaded."""
    pin = _read_lock(Path(lock_path)).get((kind, name))
    if pin is None or revision not in (pin.revision, pin.commit):
        return None
    return _home(Path(folder), HubItem(kind, name), pin.commit)


def model_folder(source: Path | str) -> Path:
    """The folder of a model: as given, or of a hub model (owner/name) that was downloaded."""
    if Path(source).exists():
        return Path(source)
    parts = str(source).split("/")
    if len(parts) == 2 and all(parts) and not parts[0].startswith("."):
        # Of a model that a run only times, the config alone may be here.
        return resolve(str(source), "model", DOWNLOADS, LOCK, patterns=DEFAULT_PATTERNS["model"])
    raise InputError(f"{source}: no such folder, and no hub name (owner/name) either")


def united(items: Iterable[HubItem]) -> list[HubItem]:
    """One item per kind and name, with all the patterns that were asked for."""
    found: dict[tuple[str, str], HubItem] = {}
    for item in items:
        item = replace(item, patterns=item.patterns or DEFAULT_PATTERNS[item.kind])
        first = found.setdefault((item.kind, item.name), item)
        if first.revision != item.revision:
            raise InputError(
                f"{item}: wanted at revisions {first.revision!r} and {item.revision!r}; "
                "one run can use only one of them"
            )
        patterns = tuple(sorted({*first.patterns, *item.patterns}))
        found[item.kind, item.name] = replace(item, patterns=patterns)
    return list(found.values())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two downloads into one folder would write to the same partial files."""
    incoming = folder / ".incoming"
    incoming.mkdir(parents=True, exist_ok=True)
    with open(incoming / "busy", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another download is writing to {folder}; wait for it") from None
        except OSError as error:
            # Some cluster filesystems have no locks. The hashes still catch a mix-up there.
            print(f"no file locks on {folder} ({error.strerror})", file=sys.stderr)
        yield


def _complete(
    item: HubItem, pin: _Pin | None, folder: Path, update: bool, endpoint: str | None
) -> _Pin:
    """The item's pin, with every file of it in place and checked."""
    if pin is None or update:
        pin = _pinned(item, pin, endpoint)
    else:
        _refuse_other_revision(item, pin)
        if not set(item.patterns) <= set(pin.patterns):
            patterns = tuple(sorted({*item.patterns, *pin.patterns}))
            at_commit = replace(item, revision=pin.commit, patterns=patterns)
            pin = replace(_pinned(at_commit, pin, endpoint), revision=pin.revision)
    home = _home(folder, item, pin.commit)
    missing = _missing(item, pin, home)
    if not missing:
        return pin
    arrivals = _fetch(item, pin.commit, missing, folder, endpoint)
    made = {file.path: _settle(file, arrivals / file.on_hub.path, home) for file in missing}
    # Also what an abandoned commit had left behind.
    shutil.rmtree(arrivals.parent)
    return replace(pin, files=tuple(made.get(file.path, file) for file in pin.files))


def _missing(item: HubItem, pin: _Pin, home: Path) -> list[_File]:
    """The files that are not there, or not what they must be."""

    def fine(file: _File) -> bool:
        matches = file.matches(home / file.path)
        bar.update(file.size)
        return matches

    total = sum(file.size for file in pin.files)
    with _progress(f"{item.name} (checking)", total) as bar, ThreadPoolExecutor(WORKERS) as pool:
        return [
            file
            for file, here in zip(pin.files, pool.map(fine, pin.files), strict=True)
            if not here
        ]


def _refuse_other_revision(item: HubItem, pin: _Pin) -> None:
    if item.revision not in (pin.revision, pin.commit):
        raise InputError(
            f"{item}: revision {item.revision!r} is wanted, but {pin.revision!r} is locked (commit "
            f"{pin.commit}): run `keycut download --configfile CONFIG --update {item.name}`"
        )


def _pinned(item: HubItem, known: _Pin | None, endpoint: str | None) -> _Pin:
    """Ask the hub which commit the revision is, and for the list of its files."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    commit = api.repo_info(item.name, repo_type=item.kind, revision=item.revision, timeout=30).sha
    if commit is None:
        raise InputError("the hub names no commit")
    files = {file.path: file for file in _chosen(item, _listing(api, item, commit))}
    if known is not None and known.commit == commit:
        files |= {file.path: file for file in known.files if file.path in files}
    return _Pin(item.revision, commit, item.patterns, tuple(files[path] for path in sorted(files)))


def _listing(api: HfApi, item: HubItem, commit: str) -> list[_File]:
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(item.name, recursive=True, revision=commit, repo_type=item.kind)
    return [
        _File(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in tree
        if isinstance(entry, RepoFile)
    ]


def _chosen(item: HubItem, listing: list[_File]) -> list[_File]:
    """The listed files that the item's patterns want and that may be fetched."""
    allowed = [file for file in listing if PurePosixPath(file.path).suffix.lower() not in NEVER]
    if item.kind == "model":
        allowed = [
            file
            for file in allowed
            if "/" not in file.path
            and (not file.path.endswith(".bin") or _safe_name(file.path) != file.path)
        ]
    chosen: dict[str, _File] = {}
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
        if (name := _safe_name(file.path)) == file.path:
            files.append(file)
        elif not safe:
            files.append(_File(name, 0, "", source=file))
    return files


def _safe_name(path: str) -> str:
    """What a pickled weights file or its index is called once converted; others keep their name."""
    match = re.fullmatch(r"pytorch_model(.*)\.bin(\.index\.json)?", path)
    return f"model{match[1]}.safetensors{match[2] or ''}" if match else path


def _fetch(
    item: HubItem, commit: str, files: list[_File], folder: Path, endpoint: str | None
) -> Path:
    """A folder in which all of `files`, as they are on the hub, lie whole and checked."""
    arrivals = _home(folder / ".incoming", item, commit)
    wanted = {file.on_hub.path: file.on_hub for file in files}
    for path, file in wanted.items():
        (arrivals / path).parent.mkdir(parents=True, exist_ok=True)
        if _size(arrivals / path) > file.size:
            (arrivals / path).unlink()
        if _size(arrivals / path) < file.size:
            _take_from_cache(item, commit, file, arrivals / path)
    have = sum(_size(arrivals / path) for path in wanted)
    total = sum(file.size for file in wanted.values())
    # Each conversion writes a second copy before the pickled one goes.
    copy = max((file.source.size for file in files if file.source), default=0)
    if (free := shutil.disk_usage(arrivals).free) < total - have + copy:
        raise InputError(
            f"disk full: {(total - have + copy) / 1e9:.1f} GB needed in {folder}, "
            f"{free / 1e9:.1f} GB free"
        )

    stop = threading.Event()

    def arrive(file: _File) -> None:
        arrived = arrivals / file.path
        if (before := _size(arrived)) < file.size:
            if file.size < LARGE:
                _client_download(item, commit, file, arrivals, endpoint)
                bar.update(file.size - before)
            else:
                _transfer(item, commit, file, arrived, endpoint, bar.update, stop)
        arrived.touch()  # an empty file needs no request
        if not stop.is_set() and not file.matches(arrived):
            arrived.unlink()
            raise InputError(
                f"{file.path}: what arrived is not what the hub lists ({file.size} bytes, hash "
                f"{file.digest}); it was thrown away"
            )

    with _progress(item.name, total, have) as bar, ThreadPoolExecutor(WORKERS) as pool:
        try:
            list(pool.map(arrive, wanted.values()))
        finally:
            # After a failure or Ctrl-C the other transfers end too. What they have stays.
            stop.set()
    return arrivals


def _take_from_cache(item: HubItem, commit: str, file: _File, place: Path) -> None:
    """The file, if the cache of the hub's client has it: linked, or copied from another disk."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(item.name, file.path, revision=commit, repo_type=item.kind)
    if isinstance(cached, str) and file.matches(Path(cached)):
        place.unlink(missing_ok=True)
        try:
            os.link(Path(cached).resolve(), place)
        except OSError:
            shutil.copyfile(cached, place)


def _client_download(
    item: HubItem, commit: str, file: _File, arrivals: Path, endpoint: str | None
) -> None:
    """One file by the hub's own client, in one go."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import silent_tqdm

    try:
        hf_hub_download(
            item.name,
            file.path,
            repo_type=item.kind,
            revision=commit,
            endpoint=endpoint,
            local_dir=arrivals,
            # Not the user's cache: that was looked into, and here no hash would be asked for.
            cache_dir=arrivals / ".cache",
            tqdm_class=silent_tqdm,  # our bar is of all files together
        )
    except RuntimeError as error:  # what xet's library raises
        raise InputError(
            f"{file.path}: {_first_line(error)} (HF_HUB_DISABLE_XET=1 does without xet)"
        ) from None


def _transfer(
    item: HubItem,
    commit: str,
    file: _File,
    partial: Path,
    endpoint: str | None,
    advance: Callable[[int], Any],
    stop: threading.Event,
) -> None:
    """Bring `partial` from the bytes that it has to the whole file."""
    import httpx
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(item.name, file.path, repo_type=item.kind, revision=commit, endpoint=endpoint)
    while (before := _size(partial)) < file.size and not stop.is_set():
        try:
            _append(url, file.size, partial, advance, stop)
        except httpx.TransportError:
            # Go on for as long as every attempt brings something.
            if _size(partial) <= before:
                raise
            time.sleep(1)


def _append(
    url: str, size: int, partial: Path, advance: Callable[[int], Any], stop: threading.Event
) -> None:
    """One request for the bytes that are missing."""
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    have = _size(partial)
    # Compressed on the way, a range would count other bytes than the file's.
    headers = build_hf_headers() | {"Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    request = http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),
        retry_on_status_codes=429,
    )
    with request as response, open(partial, "ab") as out:
        hf_raise_for_status(response)
        if response.status_code != 206:
            # The range was ignored, and the whole file comes.
            out.truncate(0)
            advance(-have)
            have = 0
        # As they come: a chunk size would hold bytes back, and a cut would lose them.
        for chunk in response.iter_bytes():
            out.write(chunk)
            advance(len(chunk))
            have += len(chunk)
            if stop.is_set() or have > size:
                break
        out.flush()
        os.fsync(out.fileno())


def _settle(file: _File, arrived: Path, home: Path) -> _File:
    """Move a file that has arrived to its place, converted where it is pickled."""
    target = home / file.path
    if file.source is None:
        target.parent.mkdir(parents=True, exist_ok=True)
        arrived.replace(target)
        return _hashed(file, target)
    print(f"converting {arrived.name} to {target.name}", file=sys.stderr)
    with atomic_write(target, force=True) as aside:
        try:
            (_convert_index if target.suffix == ".json" else _convert_weights)(arrived, aside)
        except InputError:
            arrived.unlink()
            raise
        made = _File(
            file.path, aside.stat().st_size, sha256(aside), source=_hashed(file.source, arrived)
        )
        if file.digest and file.digest != made.digest:
            raise InputError(
                f"{file.path}: converted anew it has the sha256 {made.digest}, the lock says "
                f"{file.digest}; other versions of torch or safetensors may have made it"
            )
    arrived.unlink()
    return made


def _convert_weights(pickled: Path, out: Path) -> None:
    """Write a pickled table of tensors as safetensors, one copy of each name.

    Mapped, not read: a shard costs little memory, however large it is.
    """
    import pickle
    import zipfile

    import torch
    from safetensors.torch import save_file

    try:
        state = torch.load(
            pickled, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(pickled)
        )
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise InputError(
            f"{pickled.name} is refused: it is no pickle of tensors alone"
            f"{f' (it calls for {found[1]})' if found else ''}, and reading it could run code"
        ) from None
    # Anything may come out of a broken pickle; the items after this one still have their turn.
    except Exception as error:
        raise InputError(f"{pickled.name} cannot be read: {_first_line(error)}") from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and not tensor.is_sparse
        for name, tensor in state.items()
    ):
        raise InputError(f"{pickled.name} is not a plain table of names and dense tensors")
    tensors, storages = {}, set()
    for name, tensor in state.items():
        # safetensors refuses shared memory. Tied weights become two equal copies, so that no
        # name is lost: which of them a model wants is its class's to know.
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().contiguous()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    save_file(tensors, out, metadata={"format": "pt"})


def _convert_index(pickled: Path, out: Path) -> None:
    index = read_json(pickled)
    try:
        shards = {name: _safe_name(shard) for name, shard in index["weight_map"].items()}
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{pickled.name} is not an index of sharded weights") from None
    write_json(out, {**index, "weight_map": shards})


def _read_lock(path: Path) -> _Lock:
    if not path.exists():
        return {}
    written = read_json(path)
    try:
        return {
            (kind, name): _Pin(
                pin["revision"],
                pin["commit"],
                tuple(pin["patterns"]),
                tuple(_read_file(name, file) for name, file in pin["files"].items()),
            )
            for kind in get_args(Kind)
            for name, pin in written.get(f"{kind}s", {}).items()
        }
    except (KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"{path} is not a lock file ({type(error).__name__}: {error})") from None


def _read_file(path: str, file: dict[str, Any]) -> _File:
    source = file.get("converted_from")
    return _File(
        path, file["size"], file["sha256"], _read_file(source["path"], source) if source else None
    )


def _write_lock(path: Path, lock: _Lock) -> None:
    written: dict[str, dict[str, Any]] = {f"{kind}s": {} for kind in get_args(Kind)}
    for (kind, name), pin in lock.items():
        files = {}
        for file in pin.files:
            files[file.path] = {"sha256": file.digest, "size": file.size}
            if source := file.source:
                files[file.path]["converted_from"] = {
                    "path": source.path,
                    "sha256": source.digest,
                    "size": source.size,
                }
        written[f"{kind}s"][name] = {
            "revision": pin.revision,
            "commit": pin.commit,
            "patterns": list(pin.patterns),
            "files": files,
        }
    write_json(path, written)


def _reason(error: Exception) -> str:
    """What to tell the user of an error that the network, the hub or the disk made."""
    import httpx
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "gated: accept its terms on the hub's page, then log in with `hf auth login`"
        case errors.RepositoryNotFoundError():
            return "not found on the hub (or private: then log in with `hf auth login`)"
        case errors.RevisionNotFoundError():
            return "its revision was not found on the hub"
        case errors.RemoteEntryNotFoundError():
            return f"{error.response.url.path} was not found on the hub"
        case errors.LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
            return _reason(error.__cause__)  # the client's words for whatever kept it from the hub
        case errors.HfHubHTTPError():
            return f"the hub answered {error.response.status_code} to {error.response.url.path}"
        case errors.OfflineModeIsEnabled():
            return "offline: HF_HUB_OFFLINE is set, unset it for the download"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"disk full: {error}"
        case httpx.TransportError():
            return f"offline: the hub cannot be reached ({_first_line(error)})"
    return f"{type(error).__name__}: {_first_line(error)}"


def _progress(what: str, total: int, done: int = 0) -> tqdm:
    """A bar of bytes, from five seconds on; in a log file a line every ten."""
    from huggingface_hub.utils import tqdm

    return tqdm(
        desc=what,
        initial=done,
        total=total,
        unit="B",
        unit_scale=True,
        delay=5,
        mininterval=0.5 if sys.stderr.isatty() else 10,
    )


def _home(folder: Path, item: HubItem, commit: str) -> Path:
    return folder / f"{item.kind}s" / item.name.replace("/", "--") / commit


def _hashed(file: _File, path: Path) -> _File:
    """The same file known by its sha256, where the hub gave git's hash."""
    return file if len(file.digest) == 64 else replace(file, digest=sha256(path))


def _git_hash(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
