"""Where numbers came from: what stands in, and beside, the files that they were read from."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keycut.artefact import canonical_json, read_json
from keycut.errors import InputError

LENGTH = 40  # of a value as JSON from which on it is worth to be stored once
OTHER = {"note": "made by other code of this stage than there is now"}
ROW = 50  # numbers; a longer one is counted and not shown


class Origins:
    """What files say of themselves, each read once; a number refers to its file by its place."""

    def __init__(self, now: Mapping[str, str] = {}) -> None:
        self.now = now  # the code of rules, as `other_code` takes it
        self.paths: dict[str, int] = {}
        self.told: list[Any] = []

    def add(self, path: Path | str) -> int:
        name = Path(path).as_posix()
        if name not in self.paths:
            self.paths[name] = len(self.told)
            told = told_by(path)
            self.told.append({**OTHER, **told} if other_code(told, self.now) else told)
        return self.paths[name]

    def packed(self) -> dict[str, Any]:
        """For a page: a value that many files share stands in `shared`, in its place {"$": place}.

        What software ran and which tasks were evaluated is the same in hundreds of them.
        """
        counts = Counter(text for told in self.told for text in _parts(told))
        often = [text for text, count in counts.items() if count > 1 and len(text) > LENGTH]
        places = {text: place for place, text in enumerate(often)}
        return {
            "paths": list(self.paths),
            "files": [_referring(told, places) for told in self.told],
            "shared": [json.loads(text) for text in often],
        }


def other_code(record: Any, now: Mapping[str, str]) -> bool:
    """Whether a job was of other code of its rule than there is now, of rules whose code is given.

    Those have a version: their authors say that the code gives the same (`keycut.running.code`).
    """
    return (
        isinstance(record, dict)
        and record.get("rule") in now
        and record["code"]["digest"] != now[record["rule"]]
    )


def told_by(path: Path | str) -> Any:
    """What a file says of itself: a JSON wholly but for long rows of numbers, of tensors
    (.safetensors) their header alone."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is missing: a number of the report came from it")
    if path.suffix == ".safetensors":
        return _shown(_about(path))
    return _shown(read_json(path))


def _about(path: Path) -> Any:
    """The header of a safetensors file is its length in eight bytes, then JSON."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise InputError(f"{path} is cut off or damaged")
        metadata = json.loads(file.read(length)).get("__metadata__", {})
    return json.loads(metadata["about"]) if "about" in metadata else metadata


def _shown(value: Any) -> Any:
    """JSON as browsers read it, which know no NaN and no infinity; numbers that nobody would read
    are counted."""
    if isinstance(value, dict):
        return {name: _shown(part) for name, part in value.items()}
    if isinstance(value, list):
        if len(value) > ROW and all(isinstance(part, float) for part in value):
            return f"{len(value)} numbers"
        return [_shown(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _parts(told: Any) -> Iterator[str]:
    if isinstance(told, dict):
        yield from (canonical_json(part) for part in told.values())


def _referring(told: Any, places: dict[str, int]) -> Any:
    if not isinstance(told, dict):
        return told
    texts = {name: canonical_json(part) for name, part in told.items()}
    return {
        name: {"$": places[text]} if (text := texts[name]) in places else part
        for name, part in told.items()
    }
