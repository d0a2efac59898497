"""Models and data sets of the Hugging Face hub: fetched at pinned commits, then used offline.

The lock file pins every repository: the commit that its branch was resolved to, and the size and
sha256 of each file. Only `fetch` needs a network and huggingface_hub, which does the fetching.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Literal, TypedDict

from statecut.errors import InputError
from statecut.files import check_disk_space, check_writable, read_json, sha256, write_json

logger = logging.getLogger(__name__)

Kind = Literal["model", "dataset"]
Key = tuple[Kind, str]  # kind and name of a repository

FOLDER = Path("data/hub")  # <kind>s/<owner>--<name>/<commit>/
LOCK = Path("config/revisions.lock")

# A `*` matches across folders, as in huggingface_hub, but of a model only files at the root are
# fetched: a loader reads no others. The last names of weights are as Qwen3.5 has them.
DEFAULT_PATTERNS: dict[Kind, tuple[str, ...]] = {
    "model": ("*.jinja", "*.json", "*.model", "*.txt", "model-?????-of-?????.safetensors",
              "model.safetensors", "model.safetensors-?????-of-?????.safetensors"),
    "dataset": ("*",),
}  # fmt: skip
NEVER = (".py", ".pyc", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin")  # code and pickles


@dataclass(frozen=True)
class HubItem:
    """A repository on the hub, and which of its files are needed (none: the default patterns)."""

    kind: Kind
    name: str
    revision: str = "main"
    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.name, re.ASCII):
            raise InputError(f"{self.kind} {self.name!r}: must have the form 'owner/name'")
        object.__setattr__(self, "patterns", self.patterns or DEFAULT_PATTERNS[self.kind])

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def key(self) -> Key:
        return self.kind, self.name

    def folder(self, commit: str) -> Path:
        return FOLDER / f"{self.kind}s" / self.name.replace("/", "--") / commit


class PinnedFile(TypedDict):
    """What a file must be. The hub does not list the sha256 of a small one: "" until it is here."""

    size: int
    sha256: str


class Pin(TypedDict):
    """A repository in the lock file. Paths of files are relative to its folder."""

    revision: str
    commit: str
    patterns: list[str]
    files: dict[str, PinnedFile]


def read_lock() -> dict[str, dict[str, Pin]]:
    """What is pinned, by kind ("models", "datasets") and name."""
    return {"models": {}, "datasets": {}} | (read_json(LOCK) if LOCK.exists() else {})


def resolve(
    kind: Kind, name: str, *, revision: str | None = None,
    patterns: tuple[str, ...] | None = None, verify: bool = False,
) -> Path:  # fmt: skip
    """The folder of a locked repository, whose files are complete: each has its locked size, with
    `verify` its sha256. `revision` and `patterns`, where given, must be what was locked: a
    configuration that was changed since the download is refused."""
    item = HubItem(kind, name, revision or "main", patterns or ())
    command = f"statecut download {name}" if kind == "model" else "reproduction download CONFIG"
    remedy = f"run `{command}` on a machine with a network"
    pin = read_lock()[f"{kind}s"].get(name)
    if pin is None:
        raise InputError(f"{item} was not downloaded here: {remedy}")
    if revision is not None:
        _check_revision(item, pin)
    if patterns is not None and (new := sorted({*item.patterns} - {*pin["patterns"]})):
        raise InputError(f"{item}: its files {', '.join(new)} are not in {LOCK}: {remedy}")
    for name, file in pin["files"].items():
        path = item.folder(pin["commit"]) / name
        if not path.is_file():
            raise InputError(f"{item}: {path} is missing: {remedy}")
        if path.stat().st_size != file["size"] or (verify and not _matches(path, file)):
            what = "sha256" if verify else "size"
            raise InputError(f"{item}: {path} has not the {what} of {LOCK}: {remedy}")
    return item.folder(pin["commit"])


def model_folder(source: Path | str) -> Path:
    """The folder of a model: `source` itself, or that of a downloaded hub model (owner/name)."""
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"[^./][^/]*/[^/]+", str(source)):
        raise InputError(f"{source}: no such folder, and no hub name (owner/name) either")
    try:
        # With its weights: of a model that a run only times, the config alone may be there.
        return resolve("model", str(source), patterns=DEFAULT_PATTERNS["model"])
    except InputError as error:
        raise InputError(f"{source}: no such folder; as a name on the hub: {error}") from None


def model_name(folder: Path | str) -> str:
    """What a record calls a model: owner/name of a downloaded one, else the name of its folder."""
    place = Path(folder).absolute()
    if place.parent.parent == (FOLDER / "models").absolute():
        return place.parent.name.replace("--", "/", 1)
    return place.name


def fetch(items: Iterable[HubItem], *, update: Collection[str] = ()) -> dict[Key, str]:
    """Fetch what is missing, pin it in the lock file, and return why repositories failed.

    A locked repository keeps its commit, unless `update` names it; one that fails does not stop the
    others. Files that are complete are not fetched again. HF_ENDPOINT, HF_TOKEN and a login apply.
    """
    import httpx
    from huggingface_hub.utils import WeakFileLock

    failures: dict[Key, str] = {}
    check_writable(LOCK)
    check_writable(FOLDER, folder=True).mkdir(parents=True, exist_ok=True)
    with WeakFileLock(FOLDER / ".lock"):  # two processes would overwrite each other's pins
        lock = read_lock()
        for item in items:
            pins = lock[f"{item.kind}s"]
            old = pins.get(item.name)
            new = Pin(revision=item.revision, commit=item.revision, patterns=[], files={})
            try:
                pin = _pin(item, new if old is None or item.name in update else old)
                pins[item.name] = _fetch(item, pin)
                if pins[item.name] != old:
                    write_json(LOCK, lock)
            # ValueError: an answer that is no JSON, as a captive portal gives.
            except (InputError, OSError, ValueError, httpx.HTTPError) as error:
                reason = " ".join(str(error).split())
                if isinstance(error, httpx.TransportError):
                    reason = f"offline: the hub cannot be reached ({reason})"
                elif not isinstance(error, InputError):
                    reason = f"{type(error).__name__}: {reason}"
                failures[item.key] = f"{item}: {reason}"
    return failures


def _pin(item: HubItem, pin: Pin) -> Pin:
    """The same, if it has all that is wanted, or with the files that the hub lists."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    _check_revision(item, pin)
    patterns, locked = {*item.patterns}, {*pin["patterns"]}
    if patterns <= locked:
        return pin
    api, (kind, name) = HfApi(), item.key
    commit = str(api.repo_info(name, repo_type=kind, revision=pin["commit"], timeout=30).sha)
    listing: dict[str, PinnedFile] = {
        entry.path: {"size": entry.size, "sha256": entry.lfs.sha256 if entry.lfs else ""}
        for entry in api.list_repo_tree(name, recursive=True, revision=commit, repo_type=kind)
        if isinstance(entry, RepoFile) and _allowed(kind, PurePosixPath(entry.path))
    }
    for pattern in patterns - {*DEFAULT_PATTERNS[kind]} - locked:
        if not fnmatch.filter(listing, pattern):
            raise InputError(f"nothing that may be fetched matches the pattern {pattern!r}")
    patterns |= locked
    files = {path: listing[path] for p in patterns for path in fnmatch.filter(listing, p)}
    if {*DEFAULT_PATTERNS["model"]} <= patterns and not fnmatch.filter(files, "*.safetensors"):
        raise InputError(
            "has no model*.safetensors, and pickled weights, which can run code, are not fetched: "
            "its owner can call save_pretrained once, or you convert it where you trust it"
        )
    # The hub lists no hash of a small file; the lock may have it.
    files |= {path: file for path, file in pin["files"].items() if path in files}
    return {**pin, "commit": commit, "patterns": sorted(patterns), "files": files}


def _check_revision(item: HubItem, pin: Pin) -> None:
    if item.revision not in (pin["revision"], pin["commit"]):
        program = "statecut download" if item.kind == "model" else "reproduction download CONFIG"
        raise InputError(
            f"{item}: revision {item.revision!r} is wanted, but {pin['revision']!r} is locked "
            f"(commit {pin['commit']}): run `{program} --update {item.name}`"
        )


def _allowed(kind: Kind, path: PurePosixPath) -> bool:
    inside = ".." not in path.parts and (kind == "dataset" or len(path.parts) == 1)
    return inside and path.suffix.lower() not in NEVER


def _matches(path: Path, file: PinnedFile) -> bool:
    right_size = path.is_file() and path.stat().st_size == file["size"]  # costs no reading
    return right_size and sha256(path) == file["sha256"]


def _fetch(item: HubItem, pin: Pin) -> Pin:
    """The pin with the hashes of its files, after all of them are in place and checked."""
    from huggingface_hub import snapshot_download

    logger.info("checking %s", item)
    folder, files = item.folder(pin["commit"]), {**pin["files"]}
    missing = [path for path, file in files.items() if not _matches(folder / path, file)]
    if not missing:
        return pin
    for path in missing:
        (folder / path).unlink(missing_ok=True)
    check_disk_space(folder, sum(files[path]["size"] for path in missing))
    snapshot_download(
        item.name, repo_type=item.kind, revision=pin["commit"], local_dir=folder,
        allow_patterns=[escape(path) for path in missing],
    )  # fmt: skip
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # its notes: the lock file says more
    for path in missing:
        wanted, actual = files[path]["sha256"], sha256(folder / path)
        if wanted not in ("", actual):
            (folder / path).unlink()
            raise InputError(f"{path} has the sha256 {actual}, not {wanted}, and was deleted")
        files[path] = {**files[path], "sha256": actual}
    return {**pin, "files": files}
