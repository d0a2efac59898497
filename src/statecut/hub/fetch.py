"""The download: files of the hub at pinned commits, checked by their hashes.

huggingface_hub resolves branches, lists files and fetches them. Pickled weights are converted to
safetensors, without running any code that a pickle may hold.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path, PurePosixPath

from statecut.errors import InputError, nearest
from statecut.files import (
    atomic_write,
    check_disk_space,
    check_writable,
    read_json,
    sha256,
    write_json,
)
from statecut.hub.downloads import (
    DEFAULT_PATTERNS,
    DOWNLOADS,
    Downloads,
    HubItem,
    Key,
    Kind,
    Pin,
    PinnedFile,
    merge_items,
)

logger = logging.getLogger(__name__)

# Code, and pickles that are not converted: never fetched, whatever the patterns say.
NEVER = (".py", ".pyc", ".pkl", ".pickle", ".pt", ".pth", ".ckpt")


def fetch(
    items: Iterable[HubItem],
    downloads: Downloads = DOWNLOADS,
    *,
    update: Sequence[str] = (),
    endpoint: str | None = None,
) -> dict[Key, str]:
    """Fetch what is missing, pin it in the lock file, and return why repositories failed.

    A locked repository keeps its commit, unless `update` names it. Files that are complete are not
    fetched again. HF_ENDPOINT, HF_TOKEN and a login apply. A repository that fails does not stop
    the others.
    """
    import httpx
    from huggingface_hub.utils import WeakFileLock

    items = merge_items(items)
    known = {item.name for item in items}
    if wrong := next((name for name in update if name not in known), None):
        raise InputError(f"cannot update {wrong}: not in the configuration{nearest(wrong, known)}")
    check_writable(downloads.lock)
    lock = check_writable(downloads.folder / ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    failures: dict[Key, str] = {}
    with WeakFileLock(lock):
        pins = downloads.pins()
        for item in items:
            old = pins.get(item.key)
            try:
                pin = _pin(item, old, update=item.name in update, endpoint=endpoint)
                pin = _fetch(item, pin, downloads.path(item.key, pin.commit), endpoint)
                if pin != old:
                    pins[item.key] = pin
                    downloads.write_pins(pins)
            except httpx.TransportError as error:
                failures[item.key] = f"{item}: offline: the hub cannot be reached ({error})"
            # ValueError: an answer that is no JSON, as a captive portal gives.
            except (InputError, OSError, ValueError, httpx.HTTPError) as error:
                kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
                failures[item.key] = f"{item}: {kind}{' '.join(str(error).split())}"
    return failures


def _pin(item: HubItem, old: Pin | None, *, update: bool, endpoint: str | None) -> Pin:
    """The old one, if it has all that is wanted, or one with the files that the hub lists."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    revision, patterns = item.revision, item.patterns
    if old and not update:
        old.check_revision(item)
        if {*item.patterns} <= {*old.patterns}:
            return old
        revision, patterns = old.commit, tuple(sorted({*item.patterns, *old.patterns}))
    api, name, kind = HfApi(endpoint=endpoint), item.name, item.kind
    commit = api.repo_info(name, repo_type=kind, revision=revision, timeout=30).sha
    listing = {
        entry.path: PinnedFile(entry.size, entry.lfs.sha256 if entry.lfs else "")
        for entry in api.list_repo_tree(name, recursive=True, revision=commit, repo_type=kind)
        if isinstance(entry, RepoFile)
    }
    files = _choose(kind, patterns, listing)
    if old and old.commit == commit:
        files |= {path: file for path, file in old.files.items() if path in files}
    branch = old.revision if old and not update else revision
    return Pin(branch, str(commit), patterns, dict(sorted(files.items())))


def _choose(
    kind: Kind, patterns: Sequence[str], listing: dict[str, PinnedFile]
) -> dict[str, PinnedFile]:
    """The listed files that the patterns match and that may be fetched, by what they become."""
    inside = [path for path in listing if ".." not in PurePosixPath(path).parts]
    allowed = [path for path in inside if PurePosixPath(path).suffix.lower() not in NEVER]
    if kind == "model":
        allowed = [path for path in allowed if "/" not in path]
        allowed = [p for p in allowed if not p.endswith(".bin") or safe_name(p) != p]
    for pattern in {*patterns} - {*DEFAULT_PATTERNS[kind]}:
        if not fnmatch.filter(allowed, pattern):
            raise InputError(f"nothing that may be fetched matches the pattern {pattern!r}")
    chosen = {path for pattern in patterns for path in fnmatch.filter(allowed, pattern)}
    if kind == "dataset":
        return {path: listing[path] for path in chosen}
    pickled = {path for path in chosen if safe_name(path) != path}
    if fnmatch.filter(chosen, "model*.safetensors"):
        chosen, pickled = chosen - pickled, set()
    elif not pickled and {*DEFAULT_PATTERNS["model"]} <= {*patterns}:
        raise InputError("has no weights: neither model*.safetensors nor pytorch_model*.bin")
    files = {path: listing[path] for path in chosen - pickled}
    for path in pickled:
        values = {"path": path, "size": listing[path].size, "sha256": listing[path].sha256}
        files[safe_name(path)] = PinnedFile(0, converted_from=values)
    return files


def _fetch(item: HubItem, pin: Pin, folder: Path, endpoint: str | None) -> Pin:
    """The pin with the hashes of its files, after all of them are in place and checked."""
    from huggingface_hub import snapshot_download

    logger.info("checking %s", item)
    missing = {p: file for p, file in pin.files.items() if not file.matches(folder / p)}
    if not missing:
        return pin
    sources = [file.fetched(path) for path, file in missing.items()]
    absent = {path: file for path, file in sources if not file.matches(folder / path)}
    for path in absent:
        (folder / path).unlink(missing_ok=True)
    # Each conversion writes a second copy before the pickled file is deleted.
    copies = [file.converted_from["size"] for file in missing.values() if file.converted_from]
    size = sum(file.size for file in absent.values()) + max(copies, default=0)
    check_disk_space(folder, size)
    snapshot_download(
        item.name,
        repo_type=item.kind,
        revision=pin.commit,
        local_dir=folder,
        allow_patterns=[escape(path) for path in absent],
        endpoint=endpoint,
        max_workers=4,
    )
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # its notes: the lock file says more
    return replace(pin, files=pin.files | {p: _placed(folder, p, f) for p, f in missing.items()})


def _placed(folder: Path, path: str, file: PinnedFile) -> PinnedFile:
    """With its hash, and converted where it is pickled."""
    origin, source = file.fetched(path)
    source = _checked(folder / origin, source)
    if origin == path:
        return source
    logger.info("converting %s to %s", origin, path)
    try:
        with atomic_write(folder / path, force=True) as aside:
            convert(folder / origin, aside)
    finally:
        (folder / origin).unlink()
    values = {"path": origin, "size": source.size, "sha256": source.sha256}
    size = (folder / path).stat().st_size
    return _checked(folder / path, PinnedFile(size, file.sha256, values))


def _checked(path: Path, file: PinnedFile) -> PinnedFile:
    """With its hash; a file that is not what the hub or the lock lists is deleted."""
    actual = sha256(path)
    if file.sha256 not in ("", actual):
        path.unlink()
        raise InputError(f"{path.name} has the sha256 {actual}, not {file.sha256}, and was deleted")
    return replace(file, sha256=actual)


def safe_name(path: str) -> str:
    """The name of a pickled weights file, or of its index, after conversion; others keep theirs."""
    match = re.fullmatch(r"pytorch_model(.*)\.bin(\.index\.json)?", path)
    return f"model{match[1]}.safetensors{match[2] or ''}" if match else path


def convert(pickled: Path, out: Path) -> None:
    """Weights, or their index. The file is mapped: a large shard needs little memory."""
    import zipfile

    import torch
    from safetensors.torch import save_file

    if out.suffix == ".json":
        index = read_json(pickled)
        shards = {name: safe_name(shard) for name, shard in index["weight_map"].items()}
        write_json(out, {**index, "weight_map": shards})
        return
    mapped = zipfile.is_zipfile(pickled)
    try:
        state = torch.load(pickled, map_location="cpu", weights_only=True, mmap=mapped)
        tensors, storages = {}, set()
        for name, tensor in state.items():
            # safetensors refuses shared memory. Tied weights become two equal copies, so that no
            # name is lost: only the model's class knows which of them it wants.
            storage = tensor.untyped_storage().data_ptr()
            tensor = tensor.detach().contiguous()
            tensors[name] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        raise InputError(
            f"{pickled.name} is refused: it is no table of tensors alone, and reading more could "
            f"run code ({reason})"
        ) from None
    save_file(tensors, out, metadata={"format": "pt"})
