"""Documents as a stream from files, a few in memory at a time.

A `.jsonl` file holds one JSON object per line, its text in one field. In a `.txt` file two or more
blank lines end a document, a single one only a paragraph, and spaces at the ends of lines are
dropped. Both may be compressed (`.xz`, `.gz`, `.zst`). A folder is a data set as the hub stores it:
all its `.parquet` or all its `.jsonl` files.

Corpora are sorted, by date or by site, and most uses need a small part of one. So 64 row groups of
parquet files are read in turn, at even distances over all files: the first documents are then from
everywhere. Other files have no row groups: each is a part (of more than 64 files, several are),
read from its start, and packing takes from all parts at once.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from statecut.errors import InputError
from statecut.files import digest, sha256

COMPRESSIONS = (".xz", ".gz", ".zst")
_LONGEST_DOCUMENT = 1 << 25  # bytes, far above any novel: documents are held in memory
_SIDE_BY_SIDE = 64  # files or row groups that are open; pyarrow holds some 10 MB for each
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Source:
    """Where text comes from, precise enough to find the same text again."""

    name: str
    revision: str


class Documents:
    """Documents, one after another. `parts` has the same by their origin, each with the size of its
    files in bytes."""

    def __init__(self, parts: list[tuple[int, Iterator[str]]]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(documents for _, documents in self.parts)


def read(*paths: Path | str, field: str = "text", seed: int = 0) -> Documents:
    """The documents of files or folders, each once; those of white space alone are left out.

    Row groups come first, in an order that depends on `seed`, then files without them, one by one.
    What needs no reading is checked by the call itself, before the first document is taken.
    """
    files = [file for path in paths for file in text_files(Path(path))]
    for file in files:
        if file.stat().st_size == 0:
            raise InputError(f"{file}: the file is empty")
    tables = [file for file in files if _kind(file) == ".parquet"]
    others = [file for file in files if _kind(file) != ".parquet"]
    parts = []
    if tables:
        groups = [group for file in tables for group in _row_groups(file, field)]
        order = at_even_distances(len(groups), seed)
        # Each is opened as its turn comes.
        parts = [(tables, _side_by_side(_row_group(*groups[i], field) for i in order))]
    reader = {".txt": _split_text, ".jsonl": _fields}
    count = min(len(others), _SIDE_BY_SIDE)
    for part in (others[i::count] for i in range(count)):
        texts = chain.from_iterable(reader[_kind(file)](file, field) for file in part)
        parts.append((part, texts))
    return Documents(
        [(sum(f.stat().st_size for f in part), filter(str.strip, texts)) for part, texts in parts]
    )


def describe(*paths: Path | str) -> Source:
    """The source of `read(*paths)`, by the digest of its files and not by their folder."""
    digests = [
        [file.relative_to(path).as_posix(), sha256(file)]
        for path in map(Path, paths)
        for file in text_files(path)
    ]
    revision = digests[0][1] if len(digests) == 1 else digest(digests)
    return Source(", ".join(Path(path).name for path in paths), f"sha256:{revision}")


def shuffled(documents: Iterable[str], seed: int, *, characters: int = 1 << 24) -> Iterator[str]:
    """The documents in an order that depends on `seed`, holding about `characters` of them in
    memory: a smaller text is shuffled as a whole, a larger one within a moving window."""
    # Of all its functions Python promises only random() to be the same in every version.
    uniform = random.Random(seed).random
    window: list[str] = []
    size = 0

    def take() -> str:
        chosen = int(uniform() * len(window))
        window[chosen], window[-1] = window[-1], window[chosen]
        return window.pop()

    for text in documents:
        window.append(text)
        size += len(text)
        while size > characters:
            text = take()
            size -= len(text)
            yield text
    while window:
        yield take()


def at_even_distances(count: int, seed: int) -> list[int]:
    """The numbers below `count` in an order in which every stretch is spread over all of them.

    A stretch holds the i for which i * golden mod 1 lies in one interval, and such i are one of
    three distances apart, of which the largest is less than three times the mean.
    """
    shift = random.Random(seed).random()
    return sorted(range(count), key=lambda i: (i * _GOLDEN + shift) % 1)


def _side_by_side(streams: Iterator[Iterator[str]]) -> Iterator[str]:
    """One document of each open stream in turn; a new stream replaces one that ends."""
    reading = deque(islice(streams, _SIDE_BY_SIDE))
    while reading:
        stream = reading.popleft()
        if (text := next(stream, None)) is not None:
            yield text
            reading.append(stream)
        else:
            reading.extend(islice(streams, 1))


def text_files(path: Path) -> list[Path]:
    """Those that hold a text, which is a file or a folder of them."""
    if path.is_file():
        if _kind(path) not in (".jsonl", ".txt", ".parquet"):
            raise InputError(
                f"{path}: cannot tell what it holds; expected .jsonl or .txt, plain or with "
                f"{', '.join(COMPRESSIONS)}, or .parquet"
            )
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    # By their names in the folder; huggingface_hub keeps its own files in hidden folders.
    inside = {file.relative_to(path).as_posix(): file for file in path.rglob("*")}
    files = [file for name, file in sorted(inside.items()) if "/." not in f"/{name}"]
    files = [file for file in files if file.is_file() and _kind(file) in (".jsonl", ".parquet")]
    if len({*map(_kind, files)}) == 2:
        raise InputError(
            f"{path}: holds .parquet and .jsonl files, perhaps the same text twice; name one of "
            "its folders or files"
        )
    if not files:
        raise InputError(f"{path}: holds no .parquet or .jsonl file")
    return files


def _kind(file: Path) -> str:
    """The suffix that says what a file holds, without that of its compression."""
    return Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file with their places in words; a damaged or cut off file is an error."""
    number = 0
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                yield f"{file}, line {number}", line
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{file}, after line {number}: {error}") from None


def _open(file: Path) -> Any:
    if file.suffix == ".zst":
        # Not the zstandard package, which reads a file that is cut short without an error.
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(file.suffix, open)(file, "rb")


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a `.jsonl` file, each with its place in words."""
    for place, line in _lines(file):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place}: not valid JSON ({error})") from None
        if not isinstance(record, dict):
            raise InputError(f"{place}: a JSON object was expected")
        yield place, record


def _fields(file: Path, field: str) -> Iterator[str]:
    """The documents of a `.jsonl` file."""
    for place, record in json_lines(file):
        if field not in record:
            raise InputError(f"{place}: no field {field!r}; it has {', '.join(sorted(record))}")
        yield _checked(record[field], field, place)


def _split_text(file: Path, _: str) -> Iterator[str]:
    """The documents of a `.txt` file."""
    lines: list[str] = []
    blank = size = 0
    for place, raw in _lines(file):
        try:
            line = raw.decode().rstrip()
        except UnicodeDecodeError as error:
            raise InputError(f"{place}: not UTF-8 ({error.reason})") from None
        if blank >= 2 and line and lines:
            yield "\n".join(lines).strip("\n")
            lines, size = [], 0
        blank = 0 if line else blank + 1
        lines.append(line)
        size += len(raw)
        if size > _LONGEST_DOCUMENT:
            raise InputError(
                f"{place}: a document of more than {_LONGEST_DOCUMENT >> 20} MiB; two blank lines "
                "end a document"
            )
    yield "\n".join(lines).strip("\n")


@contextmanager
def _table(file: Path, place: str) -> Iterator[Any]:
    """A parquet file; what is wrong with it is an error that names the place."""
    import pyarrow
    from pyarrow import parquet

    try:
        # With a buffer a column is read page by page, not as a whole.
        with parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{place}: {error}") from None


def _row_groups(file: Path, field: str) -> list[tuple[Path, int]]:
    """The row groups of a parquet file, from its footer."""
    with _table(file, str(file)) as table:
        names, count = table.schema_arrow.names, table.num_row_groups
    if field not in names:
        raise InputError(f"{file}: no column {field!r}; it has {', '.join(names)}")
    return [(file, number) for number in range(count)]


def _row_group(file: Path, number: int, field: str) -> Iterator[str]:
    place = f"{file}, row group {number}"
    with _table(file, place) as table:
        for batch in table.iter_batches(32, row_groups=[number], columns=[field]):
            yield from (_checked(text, field, place) for text in batch.column(0).to_pylist())


def _checked(text: object, field: str, place: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{place}: field {field!r} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which is no character.
        raise InputError(f"{place}: field {field!r} is not Unicode text ({error.reason})") from None
    return text
