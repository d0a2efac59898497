"""Packed token files: `tokens.bin`, sequences of equal length end to end, and `manifest.json`.

Documents follow one another in an order drawn from a seed, each ended by eos (or, as flame does
it, each begun by bos), and the stream is cut every `sequence_length` tokens; what is left over at
the end is dropped. Tokens are little-endian, of 16 bits where the vocabulary allows it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import count, islice
from pathlib import Path
from typing import Literal

import numpy as np

from keycut import __version__
from keycut.artefact import read_json, sha256, whole, write_json
from keycut.data.progress import Progress
from keycut.data.sources import Source, Split, shuffled
from keycut.data.tokenizer import Tokenizer
from keycut.errors import InputError

Boundary = Literal["eos", "bos"]

_BATCH = 1 << 20  # characters handed to a worker at a time


@dataclass(frozen=True)
class Manifest:
    """What `tokens.bin` holds and where it came from."""

    sha256: str
    dtype: str
    tokens: int
    sequence_length: int
    sequences: int
    vocabulary_size: int
    tokenizer: str
    tokenizer_digest: str
    boundary: Boundary
    source: Source
    split: Split | None
    seed: int
    keycut: str


def pack(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    sequence_length: int,
    source: Source,
    seed: int,
    sequences: int | None = None,
    split: Split | None = None,
    boundary: Boundary = "eos",
    workers: int = 1,
    force: bool = False,
) -> Manifest:
    """Write the folder `out`: exactly `sequences` of them, or as many as the documents give.

    `workers` is the number of threads that encode. It changes the time taken and no byte.
    """
    for name, value in (("sequence_length", sequence_length), ("workers", workers)):
        if value < 1:
            raise InputError(f"{name} {value}: must be at least 1")
    if sequences is not None and sequences < 1:
        raise InputError(f"sequences {sequences}: must be at least 1")
    mark = tokenizer.eos if boundary == "eos" else tokenizer.bos
    if mark is None:
        raise InputError(f"tokenizer {tokenizer.name} has no bos token to begin documents with")
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 1 << 16 else "<u4")
    wanted = None if sequences is None else sequences * sequence_length

    with whole(out, force=force, folder=True) as aside:
        chosen = documents if split is None else split.select(documents)
        progress = Progress("packing", tokens=wanted)
        encoded = _encoded(shuffled(chosen, seed), tokenizer, mark, boundary, workers, progress)
        tokens = 0
        hashed = hashlib.sha256()
        with open(aside / "tokens.bin", "wb") as file:
            for block in _cut(encoded, sequence_length, wanted, dtype):
                file.write(block.data)
                hashed.update(block.data)
                tokens += len(block)
        _refuse_short(tokens, wanted, sequence_length, progress, source, split)
        manifest = Manifest(
            sha256=hashed.hexdigest(),
            dtype=dtype.name,
            tokens=tokens,
            sequence_length=sequence_length,
            sequences=tokens // sequence_length,
            vocabulary_size=tokenizer.vocabulary_size,
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest,
            boundary=boundary,
            source=source,
            split=split,
            seed=seed,
            keycut=__version__,
        )
        write_json(aside / "manifest.json", asdict(manifest))
    return manifest


def _refuse_short(
    tokens: int,
    wanted: int | None,
    sequence_length: int,
    progress: Progress,
    source: Source,
    split: Split | None,
) -> None:
    corpus = source.name if split is None else f"{source.name}, split {split.name}"
    if progress.documents == 0:
        raise InputError(f"{corpus}: holds no documents")
    if tokens == 0:
        raise InputError(
            f"{corpus}: {progress.tokens} tokens are less than one sequence of {sequence_length}; "
            f"give more text or a smaller sequence_length"
        )
    if wanted is not None and tokens < wanted:
        raise InputError(
            f"{corpus}: holds {tokens // sequence_length} sequences of {sequence_length} tokens, "
            f"{wanted // sequence_length} were asked for; ask for fewer or give more text"
        )


def _encoded(
    documents: Iterator[str],
    tokenizer: Tokenizer,
    mark: int,
    boundary: Boundary,
    workers: int,
    progress: Progress,
) -> Iterator[np.ndarray]:
    """The tokens of all documents in order, a batch at a time: (tokens,) each."""

    def encode(batch: list[str]) -> np.ndarray:
        between = np.array([mark])
        parts: list[np.ndarray] = []
        for text in batch:
            tokens = tokenizer.encode(text)
            parts += [tokens, between] if boundary == "eos" else [between, tokens]
        return np.concatenate(parts)

    # Threads, since the tokenizer works outside the interpreter's lock. At most two batches for
    # each wait, so a slow disk is not outrun and memory stays bounded.
    waiting: deque[tuple[int, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(workers) as pool:

        def finished() -> np.ndarray:
            size, future = waiting.popleft()
            tokens = future.result()
            progress.add(documents=size, tokens=len(tokens))
            return tokens

        for batch in _batched(documents):
            waiting.append((len(batch), pool.submit(encode, batch)))
            if len(waiting) >= 2 * workers:
                yield finished()
        while waiting:
            yield finished()


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


def _cut(
    encoded: Iterator[np.ndarray], sequence_length: int, wanted: int | None, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The stream in blocks of whole sequences, `wanted` tokens in all."""
    rest = np.empty(0, dtype)
    given = 0
    for tokens in encoded:
        rest = np.concatenate([rest, tokens.astype(dtype)])
        size = len(rest) // sequence_length * sequence_length
        if wanted is not None:
            size = min(size, wanted - given)
        if size:
            yield rest[:size]
            rest, given = rest[size:], given + size
        if given == wanted:
            return


class PackedTokens:
    """The sequences of a packed folder, memory-mapped."""

    def __init__(self, folder: Path | str, *, verify: bool = False) -> None:
        """The manifest and the file's size are checked always, its sha256 if `verify` is set."""
        folder = Path(folder)
        self.manifest = _read_manifest(folder)
        file = folder / "tokens.bin"
        if not file.is_file():
            raise InputError(f"{file} is missing: pack the text again")
        shape = self.manifest.sequences, self.manifest.sequence_length
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        expected = shape[0] * shape[1] * dtype.itemsize
        if file.stat().st_size != expected:
            raise InputError(
                f"{file}: {file.stat().st_size} bytes where the manifest says {expected}: "
                f"it was cut short or changed; pack the text again"
            )
        if verify and sha256(file) != self.manifest.sha256:
            raise InputError(f"{file}: its sha256 is not the manifest's; pack the text again")
        self._rows = np.memmap(file, dtype=dtype, mode="r", shape=shape)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, which: int | slice) -> np.ndarray:
        """One sequence, (sequence_length,), or a slice of them, (n, sequence_length), int64."""
        return self._rows[which].astype(np.int64)

    def batches(self, batch_size: int, *, seed: int, start: int = 0) -> Iterator[np.ndarray]:
        """(batch_size, sequence_length) int64, for ever, from batch number `start` on.

        Every pass over the data has an order of its own, drawn from the seed and its number. So
        batch n is the same whether it is reached from the first or by starting there.
        """
        if batch_size < 1:
            raise InputError(f"batch_size {batch_size}: must be at least 1")
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
    if not isinstance(values, dict) or values.keys() != names:
        raise InputError(f"{file}: not a manifest of packed tokens; expected {sorted(names)}")
    split = values["split"]
    values |= {"source": Source(**values["source"]), "split": split and Split(**split)}
    return Manifest(**values)
