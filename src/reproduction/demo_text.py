"""The demo's text: the documentation of installed packages in three parts, each from other files.

The models of config/small.yaml learn from the first part, and the demo calibrates and evaluates
them on the others: `python -m reproduction.demo_text data/documentation.jsonl` writes the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

from reproduction.documentation import paragraphs
from statecut.files import atomic_write, canonical_json

Part = Literal["training", "calibration", "held_out"]

_FILES = 16  # one of so many is in each of the two small parts
_RUN = 8  # words in a row that no two parts share


def documentation_parts() -> dict[Part, list[str]]:
    """The documents of each part: the part of a file depends on its name, and so is the same in
    every version. Paragraphs that share eight words in a row with a part before are left out."""
    files = list(paragraphs())
    parts: dict[Part, list[str]] = {}
    known: set[str] = set()
    for part in get_args(Part):
        documents = [
            [text for text in texts if not parts or known.isdisjoint(word_runs(text))]
            for file, texts in files
            if part_of(file) == part
        ]
        parts[part] = ["\n\n".join(texts) for texts in documents if texts]
        known.update(run for texts in documents for text in texts for run in word_runs(text))
    return parts


def part_of(file: str) -> Part:
    """The part that a file, as `package/path`, belongs to."""
    number = sha256(file.encode()).digest()[0] % _FILES
    return "held_out" if number == 0 else "calibration" if number == _FILES // 2 else "training"


def word_runs(paragraph: str) -> set[str]:
    """Every eight words in a row."""
    words = paragraph.split()
    return {" ".join(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1)}


def write(documents: Iterable[str], path: Path | str) -> None:
    """Write documents as a `.jsonl` file."""
    with atomic_write(path, force=True) as aside, open(aside, "w", encoding="utf-8") as file:
        for text in documents:
            file.write(canonical_json({"text": text}) + "\n")


if __name__ == "__main__":
    write(documentation_parts()["training"], sys.argv[1])
