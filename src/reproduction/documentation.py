"""The demo's text: prose that every installation of Statecut has, in three parts from other files.

It is read from Python's documentation topics and from the docstrings of those of four packages that
are installed, which are parsed and not imported. Only sentences are kept: no code, tables or
signatures. The models of config/small.yaml learn from the first part, and the demo calibrates and
evaluates them on the others: `python -m reproduction.documentation data/documentation.jsonl` writes
the first.
"""

from __future__ import annotations

import ast
import inspect
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib import metadata, util
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

from statecut.data.progress import Progress
from statecut.data.sources import Source
from statecut.files import atomic_write, canonical_json

Part = Literal["training", "calibration", "held_out"]

PACKAGES = ("numpy", "pandas", "scipy", "torch")

_TESTS = {"tests", "test", "testing"}  # folders that are left out
_SHORTEST = 8  # words in a paragraph: fewer are labels and signatures
_FILES = 16  # one of so many is in each of the two small parts
_RUN = 8  # words in a row that no two parts share


def paragraphs() -> Iterator[tuple[str, list[str]]]:
    """The file and the paragraphs of each document, in an order that depends only on the installed
    versions. A paragraph is kept where it occurs first: copied and inherited docstrings would
    otherwise bring the same sentences into training and held-out text."""
    progress = Progress("reading docstrings")
    seen: set[str] = set()
    for file, text in _texts():
        progress.add(documents=1)
        new = [paragraph for paragraph in dict.fromkeys(prose(text)) if paragraph not in seen]
        seen.update(new)
        if new:
            yield file, new


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


def documentation_source() -> Source:
    """The versions that the text was read from."""
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES if util.find_spec(name)]
    return Source("documentation", ", ".join([f"python {platform.python_version()}", *versions]))


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a docstring or topic that read as sentences, each on one line."""
    lines = [line.rstrip() for line in inspect.cleandoc(text).split("\n")]
    lines = ["" if _MARKUP_LINE.match(line) else line for line in lines]
    # A change of indentation ends a paragraph: it separates `axis : int` from its description.
    for _, run in groupby(lines, key=lambda line: len(line) - len(line.lstrip()) if line else -1):
        paragraph = " ".join(" ".join(run).split())
        if paragraph.count(" ") >= _SHORTEST - 1:
            for pattern, replacement in _INLINE:
                paragraph = pattern.sub(replacement, paragraph)
            if _is_prose(paragraph):
                yield paragraph


def _is_prose(paragraph: str) -> bool:
    return (
        paragraph[:1].isupper()
        and paragraph[-1] in ".:!?"
        and not _SEE_ALSO.match(paragraph)
        and len(_NOT_PROSE.findall(paragraph)) <= 0.07 * len(paragraph)
    )


_SEE_ALSO = re.compile(r"[\w.]+ : ")
_NOT_PROSE = re.compile(r"[^\w ,.']|[\d_]")

# Doctests, directives, field lists, bullets and the underlines of headings.
_MARKUP_LINE = re.compile(r"\s*(>>>|\.\.\.|\.\. |:\w+|[-*] |([=~^*#\-\"])\2{2,}\s*$)")

_INLINE = [
    (re.compile(r":[\w:+-]+:`~?([^`<]*?)(?: ?<[^`]*>)?`"), r"\1"),  # :func:`name <target>`
    (re.compile(r"`([^`<]+?) ?<[^`]*>`_{1,2}"), r"\1"),  # `words <address>`_
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"`([^`]*)`_?"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)"), r"\1"),
    (re.compile(r" ?\[\w+\]_"), ""),  # footnotes
    (re.compile(r"::$"), ":"),
]


def _texts() -> Iterator[tuple[str, str]]:
    """Each text and the file that it is from."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]
    for package in PACKAGES:
        if (spec := util.find_spec(package)) is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        files = [file.relative_to(root) for file in root.rglob("*.py")]
        for file in sorted(files, key=Path.as_posix):
            if not any(part in _TESTS or part.startswith("_") for part in file.parts[:-1]):
                module = ast.parse((root / file).read_bytes(), filename=str(file))
                for text in _docstrings(module):
                    yield f"{package}/{file.as_posix()}", text


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    text = ast.get_docstring(node, clean=False)
    if text is not None:
        yield text
    if not isinstance(node, ast.FunctionDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from _docstrings(child)


def write(documents: Iterable[str], path: Path | str) -> None:
    """Write documents as a `.jsonl` file."""
    with atomic_write(path, force=True) as aside, open(aside, "w", encoding="utf-8") as file:
        for text in documents:
            file.write(canonical_json({"text": text}) + "\n")


if __name__ == "__main__":
    write(documentation_parts()["training"], sys.argv[1])
