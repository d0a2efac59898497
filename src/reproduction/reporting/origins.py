"""Provenance of numbers: the contents of the files that they were read from."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from statecut.errors import InputError
from statecut.files import canonical_json, read_json

SHARED_LENGTH = 40  # values that are longer as JSON are stored once
LONGEST_ROW = 50  # longer lists of numbers are counted, not shown


class Origins:
    """Contents of files, each read once; numbers refer to a file by its place."""

    def __init__(self) -> None:
        self.paths: dict[str, int] = {}
        self.contents: list[Any] = []

    def add(self, path: Path | str) -> int:
        name = Path(path).as_posix()
        if name not in self.paths:
            self.paths[name] = len(self.contents)
            self.contents.append(_read(Path(path)))
        return self.paths[name]

    def to_json(self) -> dict[str, Any]:
        """For a page. Values that several files share (software, tasks) are stored once in
        `shared`; a file then has {"$": place}."""
        texts = [
            {name: canonical_json(value) for name, value in content.items()}
            if isinstance(content, dict)
            else {}
            for content in self.contents
        ]
        counts = Counter(text for fields in texts for text in fields.values())
        shared = [text for text, n in counts.items() if n > 1 and len(text) > SHARED_LENGTH]
        places = {text: {"$": place} for place, text in enumerate(shared)}
        files = [
            {name: places.get(text, content[name]) for name, text in fields.items()}
            if isinstance(content, dict)
            else content
            for content, fields in zip(self.contents, texts, strict=True)
        ]
        return {
            "paths": list(self.paths),
            "files": files,
            "shared": [json.loads(text) for text in shared],
        }


def _read(path: Path) -> Any:
    """The content of a JSON file, or the metadata of a .safetensors file."""
    if not path.is_file():
        raise InputError(f"{path} is missing: a number of the report came from it")
    if path.suffix != ".safetensors":
        return _for_browsers(read_json(path))
    with open(path, "rb") as file:  # the header: its length in eight bytes, then JSON
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise InputError(f"{path} is cut off or damaged")
        metadata = json.loads(file.read(length)).get("__metadata__", {})
    return _for_browsers(json.loads(metadata["about"]) if "about" in metadata else metadata)


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
