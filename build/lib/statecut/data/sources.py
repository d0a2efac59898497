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
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from statecut.errors import InputError
from statecut.files import atomic_write, canonical_json, digest, sha256

COMPRESSIONS = (".xz", ".gz", ".zst")

# A large text without two blank lines would otherwise be read into memory as one document.
_LONGEST_DOCUMENT = 1 << 25  # bytes, far above any novel

_SIDE_BY_SIDE = 64  # files or row groups that are open; pyarrow holds some 10 MB for each
_GOLDEN = 0.6180339887498949

_Stream = tuple[Path, Iterator[str]]  # a file, and documents of it


@dataclass(frozen=True)
class Source:
    """Where text comes from, precise enough to find the same text again."""

    name: str
    revision: str


def shuffled(documents: Iterable[str], seed: int, *, characters: int = 1 << 24) -> Iterator[str]:
    """The documents in an order drawn from `seed`, holding about `characters` of them in memory.

    A text smaller than that is shuffled as a whole, a larger one within a moving window.
    """
    # Of all draws Python promises only random() to be the same in every version.
    draw = random.Random(seed).random
    window: list[str] = []
    size = 0

    def take() -> str:
        chosen = int(draw() * len(window))
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


def describe(*paths: Path | str) -> Source:
    """The source of `read(*paths)`, by the digest of its files and not by their folder."""
    digests = [
        [file.relative_to(path).as_posix(), sha256(file)]
        for path in map(Path, paths)
        for file in text_files(path)
    ]
    revision = digests[0][1] if len(digests) == 1 else digest(digests)
    return Source(", ".join(Path(path).name for path in paths), f"sha256:{revision}")


def write(documents: Iterable[str], path: Path | str, *, force: bool = False) -> None:
    """Write a stream as a `.jsonl` file."""
    with atomic_write(path, force=force) as aside, open(aside, "w", encoding="utf-8") as file:
        for text in documents:
            file.write(canonical_json({"text": text}) + "\n")


class Documents:
    """Documents, one after another. `parts` has the same by their origin, each with the size of its
    files in bytes."""

    def __init__(self, parts: list[tuple[int, Iterator[str]]]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(documents for _, documents in self.parts)


def read(*paths: Path | str, field: str = "text", seed: int = 0) -> Documents:
    """The documents of files or folders, each once; those of white space alone are left out.

    Row groups come first, in an order drawn from `seed`, then files without them, one by one. What
    needs no reading is checked by the call itself, before the first document is taken.
    """
    files = [file for path in paths for file in text_files(Path(path))]
    for file in files:
        if file.stat().st_size == 0:
            raise InputError(f"{file}: the file is empty")
    tables = [file for file in files if _kind(file) == ".parquet"]
    others = [file for file in files if _kind(file) != ".parquet"]
    groups = [group for file in tables for group in _row_groups(file, field)]
    ordered = [groups[i] for i in at_even_distances(len(groups), seed)]
    # All parts are open while a corpus is packed, so there are only so many.
    count = min(len(others), _SIDE_BY_SIDE)
    dealt = [others[i::count] for i in range(count)]
    # Each is opened as its turn comes.
    row_groups = ((group.file, _row_group(group, field)) for group in ordered)
    parts = [(tables, _with_text(tables, row_groups, _SIDE_BY_SIDE))] if tables else []
    parts += [(inside, _with_text(inside, _readers(inside, field), 1)) for inside in dealt]
    return Documents(
        [(sum(file.stat().st_size for file in inside), texts) for inside, texts in parts]
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer in a folder that may hold a model too."""
    return sorted(path for path in folder.glob("*token*") if path.is_file())


def matching(pattern: str) -> list[Path]:
    """The files that match a pattern, relative to the working directory or absolute."""
    root = Path(Path(pattern).anchor)
    return sorted(root.glob(str(Path(pattern).relative_to(root))))


def survey(*paths: Path | str, field: str = "text") -> tuple[int, int | None]:
    """The number of files that `read(*paths)` reads, and of their rows if all are parquet files.

    Each is opened, and read up to its first document that is not white space alone.
    """
    files = [file for path in paths for file in text_files(Path(path))]
    rows: list[int | None] = []
    for file in files:
        if not any(text.strip() for text in _reader(file, field)):
            raise InputError(f"{file}: holds no text")
        rows.append(_rows(file) if _kind(file) == ".parquet" else None)
    return len(files), None if None in rows else sum(row or 0 for row in rows)


def _rows(file: Path) -> int:
    from pyarrow import parquet

    return int(parquet.read_metadata(file).num_rows)


def _reader(file: Path, field: str) -> Iterator[str]:
    """The documents of one file in its own order."""
    if _kind(file) == ".parquet":
        groups = _row_groups(file, field)
        return chain.from_iterable(_row_group(group, field) for group in groups)
    return (_jsonl if _kind(file) == ".jsonl" else _text)(file, field)


def at_even_distances(count: int, seed: int) -> list[int]:
    """The numbers below `count` in an order in which every stretch is spread over all of them.

    A stretch holds the i for which i * golden mod 1 lies in one interval, and such i are one of
    three distances apart, of which the largest is less than three times the mean.
    """
    shift = random.Random(seed).random()
    return sorted(range(count), key=lambda i: (i * _GOLDEN + shift) % 1)


def _readers(files: list[Path], field: str) -> Iterator[_Stream]:
    return ((file, _reader(file, field)) for file in files)


def _with_text(files: list[Path], streams: Iterable[_Stream], open_at_once: int) -> Iterator[str]:
    without_text = set(files)

    def texts(file: Path, stream: Iterator[str]) -> Iterator[str]:
        for text in stream:
            if text.strip():
                without_text.discard(file)
                yield text

    yield from _side_by_side((texts(file, stream) for file, stream in streams), open_at_once)
    for file in files:
        if file in without_text:
            raise InputError(f"{file}: holds no text")


def _side_by_side(streams: Iterator[Iterator[str]], open_at_once: int) -> Iterator[str]:
    """One document of each open stream in turn; a new stream replaces one that ends."""
    reading = deque(islice(streams, open_at_once))
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
    inside = [
        (file.relative_to(path), file)
        for file in path.rglob("*")
        if _kind(file) in (".jsonl", ".parquet")
    ]
    # huggingface_hub keeps its own files in hidden folders.
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
    """The numbered lines of a file; one that is cut short or damaged is an error."""
    number = 0
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{file}, after line {number}: {error}") from None


def _open(file: Path) -> io.BufferedIOBase:
    if file.suffix == ".gz":
        return gzip.open(file)
    if file.suffix == ".xz":
        return lzma.open(file)
    if file.suffix == ".zst":
        # Not the zstandard package, which reads a file that is cut short without an error.
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return open(file, "rb")


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a `.jsonl` file, each with its place in words."""
    for number, line in _lines(file):
        if line.isspace():
            continue
        place = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place}: not valid JSON ({error})") from None
        if not isinstance(record, dict):
            raise InputError(f"{place}: a JSON object was expected")
        yield place, record


def _jsonl(file: Path, field: str) -> Iterator[str]:
    for place, record in json_lines(file):
        if field not in record:
            raise InputError(f"{place}: no field {field!r}; it has {', '.join(sorted(record))}")
        yield _checked(record[field], field, place)


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


@dataclass(frozen=True)
class _RowGroup:
    file: Path
    number: int
    first_row: int


def _row_groups(file: Path, field: str) -> list[_RowGroup]:
    """The row groups of a parquet file, from its footer."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            names, metadata = table.schema_arrow.names, table.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: {error}") from None
    if field not in names:
        raise InputError(f"{file}: no column {field!r}; it has {', '.join(names)}")
    sizes = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    starts = [0, *accumulate(sizes)][:-1]
    return [_RowGroup(file, number, start) for number, start in enumerate(starts)]


def _row_group(group: _RowGroup, field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    row = group.first_row
    try:
        # With a buffer a column is read page by page, not as a whole.
        with parquet.ParquetFile(group.file, pre_buffer=False, buffer_size=1 << 20) as table:
            for batch in table.iter_batches(32, row_groups=[group.number], columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(text, field, f"{group.file}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{group.file}, after row {row}: {error}") from None


def _checked(text: object, field: str, place: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{place}: field {field!r} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair, which is no character.
        raise InputError(f"{place}: field {field!r} is not Unicode text ({error.reason})") from None
    return text
