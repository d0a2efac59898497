"""Packed token files: `tokens.bin`, sequences of equal length end to end, and `manifest.json`.

Documents follow one another in an order that depends on a seed, each ended by eos (or, as flame
does it, each begun by bos), and the stream is cut every `sequence_length` tokens; what is left over
at the end is dropped. Tokens are little-endian, of 16 bits where the vocabulary allows it.

One file serves several uses: named slices follow one another in it, and each begins with a new
document, so no two share a sequence or a document. A slice added at the end changes none before.
Where documents come in parts, as those of several files, every slice takes sequences from each part
in proportion to its size, so that all slices have the same mixture.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, chain, count, islice, pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from statecut.data.progress import Progress
from statecut.data.sources import Documents, Source, shuffled
from statecut.data.tokenizer import Tokenizer
from statecut.errors import InputError, nearest
from statecut.files import atomic_write, read_json, write_json
from statecut.version import __version__

Boundary = Literal["eos", "bos"]

_BATCH = 1 << 20  # characters handed to a worker at a time
_WINDOW = 1 << 24  # characters held to shuffle documents


@dataclass(frozen=True)
class Manifest:
    """What `tokens.bin` holds and where it came from."""

    sha256: str
    dtype: str
    tokens: int
    sequence_length: int
    sequences: int
    slices: dict[str, tuple[int, int]]  # start and stop, in sequences
    vocabulary_size: int
    tokenizer: str
    tokenizer_digest: str
    boundary: Boundary
    source: Source
    seed: int
    statecut: str


def pack(
    documents: Iterable[str] | Documents,
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    sequence_length: int,
    source: Source,
    seed: int,
    sequences: int | Mapping[str, int] | None = None,
    boundary: Boundary = "eos",
    share_documents: bool = False,
    workers: int = 1,
    force: bool = False,
) -> Manifest:
    """Write the folder `out` with exactly `sequences` sequences, in all or per slice; None: with
    all that the text gives.

    With `share_documents` a slice may begin within the document that the one before it ends in: one
    document may then be the whole text. No two slices have a token in common.
    `workers` is the number of threads that encode; the result does not depend on it.
    """
    slices = sequences if isinstance(sequences, Mapping) else {}
    sizes = [sequences] if isinstance(sequences, int) else list(slices.values())
    special = tokenizer.eos if boundary == "eos" else tokenizer.bos
    if special is None:
        raise InputError(f"tokenizer {tokenizer.name} has no bos token to begin documents with")
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 1 << 16 else "<u4")

    def encode(texts: list[str]) -> list[np.ndarray]:
        """The tokens of each document with its eos or bos, (tokens,)."""
        pairs = ((tokenizer.encode(text), [special]) for text in texts)
        return [np.concatenate(pair if boundary == "eos" else pair[::-1]) for pair in pairs]

    aside_folder = atomic_write(out, force=force, folder=True)
    with aside_folder as aside, ThreadPoolExecutor(workers) as pool:
        progress = Progress("packing", tokens=sum(sizes) * sequence_length or None)
        parts = documents.parts if isinstance(documents, Documents) else [(1, iter(documents))]
        encoded = []
        for _, part in parts:
            texts = shuffled(part, seed, characters=_WINDOW // len(parts))
            tokens = _encoded(encode, texts, pool, workers, progress)
            encoded.append(_pieces(tokens, sequence_length) if share_documents else tokens)
        weights = [size for size, _ in parts]
        written = 0
        hashed = hashlib.sha256()
        with open(aside / "tokens.bin", "wb") as file:
            for block in _cut(encoded, weights, sequence_length, sizes or [sys.maxsize]):
                data = block.astype(dtype).data
                file.write(data)
                hashed.update(data)
                written += len(block)
        needed = sum(sizes) or 1
        if written < needed * sequence_length:
            raise InputError(
                f"{source.name}: holds {written // sequence_length} sequences of {sequence_length} "
                f"tokens, {needed} are needed; give more text, or ask for fewer or shorter ones "
                "(of a training: fewer steps)"
            )
        manifest = Manifest(
            sha256=hashed.hexdigest(),
            dtype=dtype.name,
            tokens=written,
            sequence_length=sequence_length,
            sequences=written // sequence_length,
            slices=dict(zip(slices, pairwise(accumulate([0, *sizes])), strict=False)),
            vocabulary_size=tokenizer.vocabulary_size,
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest,
            boundary=boundary,
            source=source,
            seed=seed,
            statecut=__version__,
        )
        write_json(aside / "manifest.json", asdict(manifest))
    return manifest


def _encoded(
    encode: Callable[[list[str]], list[np.ndarray]],
    documents: Iterator[str],
    pool: ThreadPoolExecutor,
    workers: int,
    progress: Progress,
) -> Iterator[np.ndarray]:
    """What `encode` makes of each document, in order."""
    # Threads, because the tokenizer releases the GIL. They are given the next documents before
    # these are waited for, and no more, so that memory stays bounded where the disk is slower.
    batches = _batched(documents)
    windows = iter(lambda: list(islice(batches, workers)), [])
    at_work = (pool.map(encode, window) for window in windows)
    for encoded, _ in pairwise(chain(at_work, [()])):
        for batch in encoded:
            progress.add(documents=len(batch), tokens=sum(map(len, batch)))
            yield from batch


def _batched(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(documents: Iterator[np.ndarray], longest: int) -> Iterator[np.ndarray]:
    """The same tokens as documents of that length at most."""
    for tokens in documents:
        yield from np.split(tokens, range(longest, len(tokens), longest))


def _cut(
    parts: Sequence[Iterator[np.ndarray]],
    weights: Sequence[int],
    sequence_length: int,
    sizes: Sequence[int],
) -> Iterator[np.ndarray]:
    """Complete sequences end to end: as many as each slice has."""
    for size in sizes:
        shares = apportion(size, weights)
        # The second time around, parts that have more make up for those that have ended.
        for part, share in [*zip(parts, shares, strict=True), *((part, size) for part in parts)]:
            for block in _sequences(part, sequence_length, min(share, size)):
                size -= len(block) // sequence_length
                yield block


def _sequences(
    encoded: Iterator[np.ndarray], sequence_length: int, size: int
) -> Iterator[np.ndarray]:
    """The next `size` sequences; what is left of the last document belongs to no slice."""
    rest = np.empty(0, np.int64)
    while size > 0 and (tokens := next(encoded, None)) is not None:
        rest = np.concatenate([rest, tokens])
        full = min(len(rest) // sequence_length, size)
        yield rest[: full * sequence_length]
        rest = rest[full * sequence_length :]
        size -= full


def apportion(size: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `size`, in proportion to the weights: largest remainders."""
    shares = [divmod(size * weight, sum(weights)) for weight in weights]
    rest = size - sum(whole for whole, _ in shares)
    largest = sorted(range(len(shares)), key=lambda i: -shares[i][1])[:rest]
    return [whole + (i in largest) for i, (whole, _) in enumerate(shares)]


class PackedTokens:
    """The sequences of a packed folder, or of one slice of it, memory-mapped."""

    def __init__(self, folder: Path | str, *, slice_name: str | None = None) -> None:
        self.manifest = _read_manifest(Path(folder))
        file, slices = Path(folder) / "tokens.bin", self.manifest.slices
        shape = self.manifest.sequences, self.manifest.sequence_length
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        if not file.is_file() or file.stat().st_size != math.prod(shape) * dtype.itemsize:
            raise InputError(f"{file} is missing, cut short or changed: pack the text again")
        if slice_name is not None and slice_name not in slices:
            raise InputError(f"{folder}: no slice {slice_name!r}{nearest(slice_name, slices)}")
        start, stop = slices[slice_name] if slice_name else (0, None)
        self._rows = np.memmap(file, dtype=dtype, mode="r", shape=shape)[start:stop]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, which: int | slice) -> np.ndarray:
        """One sequence, (sequence_length,), or a slice of them, (n, sequence_length), int64."""
        return self._rows[which].astype(np.int64)

    def batches(self, batch_size: int, *, seed: int, start: int = 0) -> Iterator[np.ndarray]:
        """(batch_size, sequence_length) int64, endless, from batch number `start` on.

        The order of each pass over the data depends on the seed and the number of the pass, so
        batch n does not depend on `start`.
        """
        order = self._order(seed, start * batch_size)
        while True:
            yield self._rows[list(islice(order, batch_size))].astype(np.int64)

    def _order(self, seed: int, start: int) -> Iterator[int]:
        first, skipped = divmod(start, len(self))
        for epoch in count(first):
            yield from np.random.default_rng([seed, epoch]).permutation(len(self))[skipped:]
            skipped = 0


def _read_manifest(folder: Path) -> Manifest:
    file = folder / "manifest.json"
    if not file.is_file():
        raise InputError(f"{folder}: not a folder of packed tokens, it has no manifest.json")
    values = read_json(file)
    names = {field.name for field in fields(Manifest)}
    if values.keys() != names:
        raise InputError(f"{file}: not a manifest of packed tokens; expected {sorted(names)}")
    values["source"] = Source(**values["source"])
    values["slices"] = {name: (start, stop) for name, (start, stop) in values["slices"].items()}
    return Manifest(**values)
