"""What was downloaded: at which commit, which files, and where they are.

The lock file pins every repository: the commit that its branch was resolved to, and the size and
sha256 of each file. Nothing here needs a network, huggingface_hub or torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from statecut.errors import InputError
from statecut.files import read_json, sha256, write_json

Kind = Literal["model", "dataset"]
Key = tuple[Kind, str]  # kind and name of a repository

# What is fetched of an item without patterns. A `*` matches across folders, as in huggingface_hub,
# but of a model only files at the root are fetched: a loader reads no others.
DEFAULT_PATTERNS: dict[Kind, tuple[str, ...]] = {
    "model": (
        "*.jinja",
        "*.json",
        "*.model",
        "*.txt",
        "model-?????-of-?????.safetensors",
        "model.safetensors",
        "model.safetensors-?????-of-?????.safetensors",  # as Qwen3.5 has them
        "pytorch_model-?????-of-?????.bin",
        "pytorch_model.bin",
    ),
    "dataset": ("*",),
}


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

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def key(self) -> Key:
        return self.kind, self.name


def merge_items(items: Iterable[HubItem]) -> list[HubItem]:
    """One item per repository, with the patterns of all."""
    merged: dict[Key, HubItem] = {}
    for item in items:
        first = merged.get(item.key, item)
        if first.revision != item.revision:
            raise InputError(
                f"{item}: wanted at revisions {first.revision!r} and {item.revision!r}; "
                "one run can use only one of them"
            )
        patterns = {*(item.patterns or DEFAULT_PATTERNS[item.kind]), *first.patterns}
        merged[item.key] = replace(item, patterns=tuple(sorted(patterns)))
    return list(merged.values())


@dataclass(frozen=True)
class PinnedFile:
    """What a file must be. Its path is relative to the folder of its repository.

    The digest is a sha256. Until a file is downloaded it may be git's own hash (40 digits), which
    is what the hub lists for small files, or empty for one that is still to be converted.
    """

    path: str
    size: int
    digest: str
    source: PinnedFile | None = None  # the pickled file on the hub that this one is converted from

    def __post_init__(self) -> None:
        if ".." in PurePosixPath(self.path).parts or PurePosixPath(self.path).is_absolute():
            raise InputError(f"file {self.path!r} would lie outside of its folder")

    def matches(self, file: Path) -> bool:
        """The size is compared first: it costs no reading."""
        if not self.digest or not file.is_file() or file.stat().st_size != self.size:
            return False
        return (sha256(file) if len(self.digest) == 64 else _git_hash(file)) == self.digest

    def with_sha256(self, file: Path) -> PinnedFile:
        return self if len(self.digest) == 64 else replace(self, digest=sha256(file))

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"sha256": self.digest, "size": self.size}
        if self.source:
            values["converted_from"] = {"path": self.source.path, **self.source.to_json()}
        return values

    @classmethod
    def from_json(cls, path: str, values: dict[str, Any]) -> PinnedFile:
        origin = values.get("converted_from")
        source = cls.from_json(origin["path"], origin) if origin else None
        return cls(path, values["size"], values["sha256"], source)


@dataclass(frozen=True)
class Pin:
    """A repository in the lock file."""

    revision: str
    commit: str
    patterns: tuple[str, ...]
    files: tuple[PinnedFile, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{40}", self.commit):
            raise InputError(f"commit {self.commit!r}: must be 40 hexadecimal digits")

    def check_revision(self, item: HubItem) -> None:
        if item.revision not in (self.revision, self.commit):
            raise InputError(
                f"{item}: revision {item.revision!r} is wanted, but {self.revision!r} is locked "
                f"(commit {self.commit}): run `reproduction download CONFIG --update "
                f"{item.name}`"
            )

    def to_json(self) -> dict[str, Any]:
        files = {file.path: file.to_json() for file in self.files}
        return {**vars(self), "patterns": list(self.patterns), "files": files}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Pin:
        files = tuple(PinnedFile.from_json(*file) for file in values["files"].items())
        return cls(values["revision"], values["commit"], tuple(values["patterns"]), files)


@dataclass(frozen=True)
class Downloads:
    """A folder of downloads, FOLDER/<kind>s/<owner>--<name>/<commit>/, and its lock file."""

    folder: Path = Path("data/hub")
    lock: Path = Path("config/revisions.lock")

    def pins(self) -> dict[Key, Pin]:
        if not self.lock.exists():
            return {}
        values = read_json(self.lock)
        try:
            return {
                (kind, name): Pin.from_json(pin)
                for kind in get_args(Kind)
                for name, pin in values.get(f"{kind}s", {}).items()
            }
        except (KeyError, TypeError, AttributeError, InputError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.lock} is not a lock file ({reason})") from None

    def write_pins(self, pins: dict[Key, Pin]) -> None:
        values: dict[str, dict[str, Any]] = {f"{kind}s": {} for kind in get_args(Kind)}
        for (kind, name), pin in pins.items():
            values[f"{kind}s"][name] = pin.to_json()
        write_json(self.lock, values)

    def commits(self) -> dict[Key, str]:
        """The locked commit of every repository."""
        return {key: pin.commit for key, pin in self.pins().items()}

    def path(self, key: Key, commit: str) -> Path:
        kind, name = key
        return self.folder / f"{kind}s" / name.replace("/", "--") / commit

    def resolve(
        self,
        kind: Kind,
        name: str,
        *,
        revision: str | None = None,
        patterns: Sequence[str] | None = None,
        verify: bool = False,
    ) -> Path:
        """The folder of a locked repository, whose files are complete.

        Every file must have its locked size, and with `verify` its sha256. `revision` and
        `patterns`, where given, must be what was locked: a configuration that was changed since the
        download is refused.
        """
        item = HubItem(kind, name, revision or "main")
        command = f"statecut download {name}" if kind == "model" else "reproduction download CONFIG"
        remedy = f"run `{command}` on a machine with a network"
        pin = self.pins().get(item.key)
        if pin is None:
            raise InputError(f"{item} is not in {self.lock}: {remedy}")
        if revision is not None:
            pin.check_revision(item)
        if patterns is not None:
            new = sorted({*(patterns or DEFAULT_PATTERNS[kind])} - {*pin.patterns})
            if new:
                raise InputError(
                    f"{item}: its files {', '.join(new)} are not in {self.lock}: {remedy}"
                )
        folder = self.path(item.key, pin.commit)
        for file in pin.files:
            path = folder / file.path
            if not path.is_file():
                raise InputError(f"{item}: {path} is missing: {remedy}")
            if (size := path.stat().st_size) != file.size:
                raise InputError(
                    f"{item}: {path} has {size} bytes, {self.lock} says {file.size}: {remedy}"
                )
            if verify and not file.matches(path):
                raise InputError(f"{item}: {path} has not the sha256 of {self.lock}: {remedy}")
        return folder

    def find(self, kind: Kind, name: str, *, revision: str) -> Path | None:
        """The folder of a repository that is locked at this revision, its files unchecked; None if
        that revision was never downloaded."""
        pin = self.pins().get((kind, name))
        if pin is None or revision not in (pin.revision, pin.commit):
            return None
        return self.path((kind, name), pin.commit)


DOWNLOADS = Downloads()
"""Those of a checkout."""


def model_folder(source: Path | str) -> Path:
    """The folder of a model: `source` itself, or that of a downloaded hub model (owner/name)."""
    if Path(source).exists():
        return Path(source)
    parts = str(source).split("/")
    if len(parts) == 2 and all(parts) and not parts[0].startswith("."):
        # Of a model that a run only times, only the config may have been downloaded.
        try:
            return DOWNLOADS.resolve("model", str(source), patterns=DEFAULT_PATTERNS["model"])
        except InputError as error:
            raise InputError(f"{source}: no such folder; as a name on the hub: {error}") from None
    raise InputError(f"{source}: no such folder, and no hub name (owner/name) either")


def _git_hash(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
