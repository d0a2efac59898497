"""Documents as a stream, from the files that hold them. One document is in memory at a time.

A `.jsonl` file holds one JSON object per line, its text in one field. In a `.txt` file two or more
blank lines end a document; a single one is only a new paragraph, and
spaces at the ends of lines go. Both may be compressed (`.xz`,
`.gz`, `.zst`). A folder is a data set as the hub stores it: all its `.parquet` or all its `.jsonl`
files, in the order of their names.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from keycut.artefact import canonical_json, digest, sha256, whole
from keycut.errors import InputError

COMPRESSIONS = (".xz", ".gz", ".zst")

# Without this a large text with no two blank lines anywhere would be read into memory as one.
_LONGEST_DOCUMENT = 1 << 25  # bytes, far above any novel


@dataclass(frozen=True)
class Source:
    """Where text comes from, well enough to find the same text again."""

    name: str
    revision: str


def shuffled(documents: Iterable[str], seed: int, *, characters: int = 1 << 24) -> Iterator[str]:
    """The documents in an order drawn from `seed`, holding about `characters` of them in memory.

    A text smaller than that is shuffled as a whole, a larger one within a moving window.
    """
    # random() is the one draw that Python promises to keep the same from version to version.
    draw = random.Random(seed).random
    window: list[str] = []
    held = 0

    def take() -> str:
        chosen = int(draw() * len(window))
        window[chosen], window[-1] = window[-1], window[chosen]
        return window.pop()

    for text in documents:
        window.append(text)
        held += len(text)
        while held > characters:
            text = take()
            held -= len(text)
            yield text
    while window:
        yield take()


def describe(*paths: Path | str) -> Source:
    """The source of `read(*paths)`, known by the digest of its files and not by where they lie."""
    digests = [
        [file.relative_to(path).as_posix(), sha256(file)]
        for path in map(Path, paths)
        for file in _files(path)
    ]
    revision = digests[0][1] if len(digests) == 1 else digest(digests)
    return Source(", ".join(Path(path).name for path in paths), f"sha256:{revision}")


def write(documents: Iterable[str], path: Path | str, *, force: bool = False) -> None:
    """Keep a stream as a `.jsonl` file, for text that is dear to make and read more than once."""
    with whole(path, force=force) as aside, open(aside, "w", encoding="utf-8") as file:
        for text in documents:
            file.write(canonical_json({"text": text}) + "\n")


def read(*paths: Path | str, field: str = "text") -> Iterator[str]:
    """The documents of files or folders, in order; those of nothing but white space are left out.

    What can be known without reading is checked at once, not when the first document is asked for.
    """
    files = [file for path in paths for file in _files(Path(path))]
    for file in files:
        if file.stat().st_size == 0:
            raise InputError(f"{file}: the file is empty")
    return _documents(files, field)


def _documents(files: list[Path], field: str) -> Iterator[str]:
    readers = {".parquet": _parquet, ".jsonl": _jsonl, ".txt": _text}
    for file in files:
        found = False
        for text in readers[_kind(file)](file, field):
            if text.strip():
                found = True
                yield text
        if not found:
            raise InputError(f"{file}: holds no text")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if _kind(path) not in (".jsonl", ".txt", ".parquet"):
            raise InputError(
                f"{path}: cannot tell what it holds; expected .jsonl or .txt, plain or with "
                f"{', '.join(COMPRESSIONS)}, or .parquet"
            )
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    inside = [
        (file.relative_to(path), file)
        for file in path.rglob("*")
        if _kind(file) in (".jsonl", ".parquet")
    ]
    # The hub's client keeps its own files in hidden folders.
    files = [
        file
        for name, file in sorted(inside, key=lambda pair: pair[0].as_posix())
        if not any(part.startswith(".") for part in name.parts)
    ]
    kinds = {_kind(file) for file in files}
    if len(kinds) == 2:
        raise InputError(
            f"{path}: holds .parquet and .jsonl files, perhaps the same text twice; "
            f"name one of its folders or files"
        )
    if not files:
        raise InputError(f"{path}: holds no .parquet or .jsonl file")
    return files


def _kind(file: Path) -> str:
    """The suffix that says what a file holds, without that of its compression."""
    return Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a file. One that was cut short is an error, not an early end."""
    number = 0
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"{file}, after line {number}: {error}") from None


def _open(file: Path) -> io.BufferedIOBase:
    if file.suffix == ".gz":
        return gzip.open(file)
    if file.suffix == ".xz":
        return lzma.open(file)
    if file.suffix == ".zst":
        # Not the zstandard package: it takes a file that was cut short for a finished one.
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return open(file, "rb")


def _jsonl(file: Path, field: str) -> Iterator[str]:
    for number, line in _lines(file):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}, line {number}: not valid JSON ({error})") from None
        if not isinstance(record, dict):
            raise InputError(f"{file}, line {number}: a JSON object was expected")
        if field not in record:
            raise InputError(
                f"{file}, line {number}: no field {field!r}; it has {', '.join(sorted(record))}"
            )
        yield _checked(record[field], field, f"{file}, line {number}")


def _text(file: Path, field: str) -> Iterator[str]:
    lines: list[str] = []
    blank = size = 0
    for number, raw in _lines(file):
        try:
            line = raw.decode().rstrip()
        except UnicodeDecodeError as error:
            raise InputError(f"{file}, line {number}: not UTF-8 ({error.reason})") from None
        if blank >= 2 and line and lines:
            yield "\n".join(lines).strip("\n")
            lines, size = [], 0
        blank = 0 if line else blank + 1
        lines.append(line)
        size += len(raw)
        if size > _LONGEST_DOCUMENT:
            raise InputError(
                f"{file}, line {number}: a document of more than {_LONGEST_DOCUMENT >> 20} MiB; "
                f"two blank lines end a document"
            )
    yield "\n".join(lines).strip("\n")


def _parquet(file: Path, field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(file, pre_buffer=False) as table:
            if field not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise InputError(f"{file}: no column {field!r}; it has {names}")
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(text, field, f"{file}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}, after row {row}: {error}") from None


def _checked(text: object, field: str, place: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{place}: field {field!r} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which is no character.
        raise InputError(f"{place}: field {field!r} is not Unicode text ({error.reason})") from None
    return text
