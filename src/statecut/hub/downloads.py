"""What was downloaded: at which commit, which files, and where they are.

The lock file pins every repository: the commit that its branch was resolved to, and the size and
sha256 of each file. Nothing here needs a network, huggingface_hub or torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
    """What a file must be."""

    size: int
    sha256: str = ""  # of a small file unknown until it was fetched: the hub does not list it
    converted_from: dict[str, Any] | None = None  # path, size and sha256 of the pickled file

    def fetched(self, path: str) -> tuple[str, PinnedFile]:
        """What is on the hub: the file itself, or the one that it is converted from."""
        if self.converted_from is None:
            return path, self
        values = self.converted_from
        return values["path"], PinnedFile(values["size"], values["sha256"])

    def matches(self, file: Path) -> bool:
        """The size is compared first: it costs no reading."""
        right_size = file.is_file() and file.stat().st_size == self.size
        return right_size and sha256(file) == self.sha256


@dataclass(frozen=True)
class Pin:
    """A repository in the lock file. Paths of files are relative to its folder."""

    revision: str
    commit: str
    patterns: tuple[str, ...]
    files: dict[str, PinnedFile]

    def check_revision(self, item: HubItem) -> None:
        if item.revision not in (self.revision, self.commit):
            raise InputError(
                f"{item}: revision {item.revision!r} is wanted, but {self.revision!r} is locked "
                f"(commit {self.commit}): run `reproduction download CONFIG --update {item.name}`"
            )


@dataclass(frozen=True)
class Downloads:
    """A folder of downloads, FOLDER/<kind>s/<owner>--<name>/<commit>/, and its lock file."""

    folder: Path = Path("data/hub")
    lock: Path = Path("config/revisions.lock")

    def pins(self) -> dict[Key, Pin]:
        values = read_json(self.lock) if self.lock.exists() else {}
        pins: dict[Key, Pin] = {}
        try:
            for kind in get_args(Kind):
                for name, pin in values.get(f"{kind}s", {}).items():
                    files = {path: PinnedFile(**file) for path, file in pin["files"].items()}
                    patterns = tuple(pin["patterns"])
                    pins[kind, name] = Pin(pin["revision"], pin["commit"], patterns, files)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self.lock} is not a lock file ({error!r})") from None
        return pins

    def write_pins(self, pins: dict[Key, Pin]) -> None:
        values: dict[str, Any] = {f"{kind}s": {} for kind in get_args(Kind)}
        for (kind, name), pin in pins.items():
            values[f"{kind}s"][name] = asdict(pin)
            for file in values[f"{kind}s"][name]["files"].values():
                if file["converted_from"] is None:
                    del file["converted_from"]
        write_json(self.lock, values)

    def commits(self) -> dict[Key, str]:
        """The locked commit of every repository."""
        return {key: pin.commit for key, pin in self.pins().items()}

    def path(self, key: Key, commit: str) -> Path:
        kind, name = key
        return self.folder / f"{kind}s" / name.replace("/", "--") / commit

    def resolve(
        self, kind: Kind, name: str, *, revision: str | None = None,
        patterns: Sequence[str] | None = None, verify: bool = False,
    ) -> Path:  # fmt: skip
        """The folder of a locked repository, whose files are complete: each has its locked size,
        with `verify` its sha256. `revision` and `patterns`, where given, must be what was locked: a
        configuration that was changed since the download is refused."""
        item = HubItem(kind, name, revision or "main")
        command = f"statecut download {name}" if kind == "model" else "reproduction download CONFIG"
        remedy = f"run `{command}` on a machine with a network"
        pin = self.pins().get(item.key)
        if pin is None:
            raise InputError(f"{item} is not in {self.lock}: {remedy}")
        if revision is not None:
            pin.check_revision(item)
        wanted = DEFAULT_PATTERNS[kind] if patterns == () else patterns or ()
        if new := sorted({*wanted} - {*pin.patterns}):
            raise InputError(f"{item}: its files {', '.join(new)} are not in {self.lock}: {remedy}")
        folder = self.path(item.key, pin.commit)
        for name, file in pin.files.items():
            path = folder / name
            if not path.is_file():
                raise InputError(f"{item}: {path} is missing: {remedy}")
            if path.stat().st_size != file.size or (verify and not file.matches(path)):
                what = "sha256" if verify else "size"
                raise InputError(f"{item}: {path} has not the {what} of {self.lock}: {remedy}")
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
    if re.fullmatch(r"[^./][^/]*/[^/]+", str(source)):
        # Of a model that a run only times, only the config may have been downloaded.
        try:
            return DOWNLOADS.resolve("model", str(source), patterns=())
        except InputError as error:
            raise InputError(f"{source}: no such folder; as a name on the hub: {error}") from None
    raise InputError(f"{source}: no such folder, and no hub name (owner/name) either")
