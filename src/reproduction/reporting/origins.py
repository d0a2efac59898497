"""Provenance of numbers: the contents of the files that they were read from."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from statecut.files import canonical_json, read_json

SHARED_LENGTH = 40  # values that are longer as JSON are stored once
LONGEST_ROW = 50  # longer lists of numbers are counted, not shown


class Origins:
    """Contents of files, each read once; numbers refer to a file by its place."""

    def __init__(self) -> None:
        self.contents: dict[str, dict[str, Any]] = {}
        self.places: dict[str, int] = {}

    def add(self, path: Path | str) -> int:
        name = Path(path).as_posix()
        if name not in self.contents:
            self.contents[name] = _for_browsers(_read(Path(path)))
        return self.places.setdefault(name, len(self.places))

    def to_json(self) -> dict[str, Any]:
        """For a page. Values that several files share (software, tasks) are stored once in
        `shared`; a file then has {"$": place}."""
        texts = [
            {name: canonical_json(value) for name, value in content.items()}
            for content in self.contents.values()
        ]
        counts = Counter(text for fields in texts for text in fields.values())
        shared = [text for text, n in counts.items() if n > 1 and len(text) > SHARED_LENGTH]
        places = {text: {"$": place} for place, text in enumerate(shared)}
        return {
            "paths": list(self.contents),
            "files": [
                {name: places.get(text) or json.loads(text) for name, text in fields.items()}
                for fields in texts
            ],
            "shared": [json.loads(text) for text in shared],
        }


def _read(path: Path) -> Any:
    """The content of a JSON file, or what a file of tensors says about itself."""
    if path.suffix != ".safetensors":
        return read_json(path)
    with open(path, "rb") as file:  # the header: its length in eight bytes, then JSON
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata = header.get("__metadata__", {})
    return json.loads(metadata["about"]) if "about" in metadata else metadata


def _for_browsers(value: Any) -> Any:
    """JSON without NaN and infinity, which browsers do not read, and without long lists."""
    if isinstance(value, dict):
        return {name: _for_browsers(part) for name, part in value.items()}
    if isinstance(value, list):
        if len(value) > LONGEST_ROW and all(isinstance(part, float) for part in value):
            return f"{len(value)} numbers"
        return [_for_browsers(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
