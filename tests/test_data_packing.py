"""Packed tokens: what is in the file, that it is always the same, and what is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from reproduction.new_tokenizers import train_tokenizer
from statecut.data import packing
from statecut.data.packing import PackedTokens, pack
from statecut.data.progress import Progress
from statecut.data.sources import Source, read, shuffled
from statecut.data.tokenizer import Tokenizer
from statecut.errors import InputError

SOURCE = Source("invented", "1")
OPTIONS: dict[str, Any] = {"sequence_length": 16, "source": SOURCE, "seed": 0}


def documents(count: int = 400, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices("aeinorst", k=draw.randint(1, 7))) for _ in range(500)]
    return [f"{i}: " + " ".join(draw.choices(words, k=draw.randint(1, 80))) for i in range(count)]


def words(size: int) -> Tokenizer:
    """A tokenizer of `size` ids: the words w2, w3, ... behind bos and eos."""
    vocabulary = {f"w{i}": i for i in range(2, size)} | {"<s>": 0, "</s>": 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer("words", "0", backend, size, bos=0, eos=1)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    return train_tokenizer(documents(), folder, vocabulary_size=600)


def test_every_document_is_there_in_order_with_eos_behind_it(
    tmp_path: Path, bpe: Tokenizer
) -> None:
    texts = documents()
    manifest = pack(texts, bpe, tmp_path / "a", sequence_length=16, source=SOURCE, seed=3)
    stream = PackedTokens(tmp_path / "a")[:].reshape(-1)
    assert manifest.tokens == len(stream) == manifest.sequences * 16
    ends = np.flatnonzero(stream == bpe.eos)
    decoded = [bpe.backend.decode(part.tolist()) for part in np.split(stream, ends + 1)]
    order = {text: i for i, text in enumerate(texts)}
    complete = [order[text.removesuffix("<|endoftext|>")] for text in decoded[:-1]]
    # Less than a sequence is dropped, so only the last document can be cut.
    assert len(complete) >= len(texts) - 2
    assert len(set(complete)) == len(complete)
    assert complete != sorted(complete)
    everything = sum(len(bpe.encode(text)) + 1 for text in texts)
    assert 0 <= everything - len(stream) < 16


def test_documents_may_begin_with_bos_instead(tmp_path: Path) -> None:
    options = {**OPTIONS, "sequence_length": 3, "boundary": "bos"}
    pack(["w2 w3", "w4 w5"], words(9), tmp_path / "a", **options)
    assert sorted(PackedTokens(tmp_path / "a")[:].tolist()) == [[0, 2, 3], [0, 4, 5]]


def test_neither_workers_nor_batches_leave_a_trace_in_the_bytes(
    tmp_path: Path, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [(size, workers) for size in (1, 1000, 1 << 20) for workers in (1, 2, 5)]
    for size, workers in folders:
        monkeypatch.setattr(packing, "_BATCH", size)
        pack(documents(), bpe, tmp_path / f"{size}-{workers}", workers=workers, **OPTIONS)
    for name in ("tokens.bin", "manifest.json"):
        assert len({path.read_bytes() for path in tmp_path.glob(f"*/{name}")}) == 1


def test_a_seed_fixes_the_bytes_and_another_changes_them(tmp_path: Path, bpe: Tokenizer) -> None:
    digests = [
        pack(documents(), bpe, tmp_path / str(i), sequence_length=16, source=SOURCE, seed=seed)
        for i, seed in enumerate((5, 5, 6))
    ]
    assert digests[0] == digests[1]
    assert digests[0].sha256 != digests[2].sha256


def test_small_slices_have_text_from_all_row_groups_for_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    from pyarrow import parquet

    # Row group g says nothing but its own word. There is far more text than the window holds.
    monkeypatch.setattr(packing, "_BATCH", 1000)
    monkeypatch.setattr(packing, "shuffled", partial(shuffled, characters=20_000))
    (tmp_path / "set").mkdir()
    for file in range(3):
        texts = [" ".join([f"w{2 + file * 16 + row // 200}"] * 10) for row in range(16 * 200)]
        table = pyarrow.table({"text": texts})
        parquet.write_table(table, tmp_path / "set" / f"{file}.parquet", row_group_size=200)
    digests = set()
    for workers in (1, 2, 4):
        manifest = pack(
            read(tmp_path / "set", seed=1),
            words(50),
            tmp_path / str(workers),
            sequences={"held_out": 60, "calibration": 60},
            workers=workers,
            **OPTIONS,
        )
        digests.add(manifest.sha256)
    assert len(digests) == 1
    for name in ("held_out", "calibration"):
        tokens = PackedTokens(tmp_path / "1", slice_name=name)[:]
        assert len(set(tokens.reshape(-1).tolist()) - {1}) > 0.6 * 48


def test_every_form_of_a_corpus_gives_the_same_bytes(tmp_path: Path, bpe: Tokenizer) -> None:
    import gzip
    import lzma

    import pyarrow
    from pyarrow import parquet

    texts = documents()
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(bytes(pyarrow.Codec("zstd").compress(lines)))
    (tmp_path / "a.txt").write_text("\n\n\n".join(texts))
    (tmp_path / "hub").mkdir()
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "hub" / "train.parquet")
    digests = {
        name: pack(read(tmp_path / name), bpe, tmp_path / "packed" / name, **OPTIONS).sha256
        for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.txt", "hub")
    }
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_tokens_are_as_wide_as_the_vocabulary_asks(tmp_path: Path, size: int, dtype: str) -> None:
    tokenizer = words(size)
    text = f"w{size - 1} w2 w{size - 2}"
    manifest = pack([text], tokenizer, tmp_path / "a", sequence_length=4, source=SOURCE, seed=0)
    assert manifest.dtype == dtype
    assert (tmp_path / "a" / "tokens.bin").stat().st_size == 4 * int(dtype[4:]) // 8
    assert PackedTokens(tmp_path / "a")[0].tolist() == [size - 1, 2, size - 2, 1]


def test_a_limit_is_met_exactly_and_stops_the_reading(tmp_path: Path, bpe: Tokenizer) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "a few words and a few more of them " * 400

    options = {**OPTIONS, "sequence_length": 64}
    manifest = pack(endless(), bpe, tmp_path / "a", sequences=7, **options)
    assert (manifest.sequences, manifest.tokens) == (7, 448)
    assert len(PackedTokens(tmp_path / "a")) == 7
    with pytest.raises(InputError, match=r"holds \d+ sequences of 64 tokens, 100000 are needed"):
        pack(documents(), bpe, tmp_path / "b", sequences=100_000, **options)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("boundary", ["eos", "bos"])
def test_slices_share_no_document(tmp_path: Path, boundary: packing.Boundary) -> None:
    # Document i says nothing but its own word, ten times.
    texts = [" ".join([f"w{i}"] * 10) for i in range(2, 400)]
    sizes = {"held_out": 7, "calibration": 20, "train": 150}
    options = {**OPTIONS, "boundary": boundary}
    manifest = pack(texts, words(400), tmp_path / "a", sequences=sizes, **options)
    assert manifest.slices == {"held_out": (0, 7), "calibration": (7, 27), "train": (27, 177)}
    assert PackedTokens(tmp_path / "a").manifest == manifest
    parts = {name: PackedTokens(tmp_path / "a", slice_name=name) for name in sizes}
    assert {name: len(part) for name, part in parts.items()} == sizes
    pieces = [set(part[:].reshape(-1).tolist()) - {0, 1} for part in parts.values()]
    assert sum(map(len, pieces)) == len(set().union(*pieces))
    for part in parts.values():
        first = part[0].tolist()
        document = [0] + [first[1]] * 10 if boundary == "bos" else [first[0]] * 10 + [1]
        assert first[:11] == document
    with pytest.raises(
        InputError, match="no slice 'recovery'; known: calibration, held_out, train"
    ):
        PackedTokens(tmp_path / "a", slice_name="recovery")


def test_slices_of_one_document_share_no_token(tmp_path: Path) -> None:
    text = [" ".join(f"w{i}" for i in range(2, 400))]
    sizes = {"calibration": 5, "held_out": 2}
    with pytest.raises(InputError, match="holds 5 sequences of 16 tokens, 7 are needed"):
        pack(text, words(400), tmp_path / "a", sequences=sizes, **OPTIONS)
    pack(text, words(400), tmp_path / "a", sequences=sizes, share_documents=True, **OPTIONS)
    parts = [PackedTokens(tmp_path / "a", slice_name=name)[:].reshape(-1) for name in sizes]
    assert [part.tolist() for part in parts] == [[*range(2, 82)], [*range(82, 114)]]


def test_a_slice_added_at_the_end_changes_none_before(tmp_path: Path, bpe: Tokenizer) -> None:
    pack(documents(), bpe, tmp_path / "a", sequences={"x": 9, "y": 30}, **OPTIONS)
    pack(documents(), bpe, tmp_path / "b", sequences={"x": 9, "y": 30, "z": 5}, **OPTIONS)
    before, after = ((tmp_path / name / "tokens.bin").read_bytes() for name in "ab")
    assert after.startswith(before)


def test_batches_of_a_slice_stay_in_it(tmp_path: Path, bpe: Tokenizer) -> None:
    pack(documents(), bpe, tmp_path / "a", sequences={"x": 9, "y": 30}, **OPTIONS)
    part = PackedTokens(tmp_path / "a", slice_name="y")
    batch = next(part.batches(30, seed=1))
    assert sorted(batch.tolist()) == sorted(PackedTokens(tmp_path / "a")[9:39].tolist())


def test_a_corpus_that_is_empty_or_too_short_writes_nothing(tmp_path: Path, bpe: Tokenizer) -> None:
    options = {"source": SOURCE, "seed": 0}
    with pytest.raises(InputError, match="invented: holds 0 sequences of 8 tokens, 1 are needed"):
        pack([], bpe, tmp_path / "a", sequence_length=8, **options)
    with pytest.raises(InputError, match="invented: holds 0 sequences of 512 tokens"):
        pack(["a few words"], bpe, tmp_path / "a", sequence_length=512, **options)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_done_is_refused_before_any_work(tmp_path: Path, bpe: Tokenizer) -> None:
    def untouched() -> Iterator[str]:
        pytest.fail("the documents were read")
        yield ""

    (tmp_path / "file").touch()
    (tmp_path / "there" / "notes").mkdir(parents=True)
    for out, message in (("file/inside", "cannot be written"), ("there", "exists already")):
        with pytest.raises(InputError, match=message):
            pack(untouched(), bpe, tmp_path / out, **OPTIONS)
    without = Tokenizer("bare", "0", bpe.backend, 600, bos=None, eos=0)
    with pytest.raises(InputError, match="bare has no bos"):
        pack(untouched(), without, tmp_path / "a", boundary="bos", **OPTIONS)


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, bpe: Tokenizer) -> None:
    lines = [json.dumps({"text": text}) for text in documents()] + ['{"text": ']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match="line 401"):
        pack(read(tmp_path / "a.jsonl"), bpe, tmp_path / "out", workers=2, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.fixture
def packed(tmp_path: Path, bpe: Tokenizer) -> Path:
    pack(documents(), bpe, tmp_path / "packed", sequence_length=32, source=SOURCE, seed=0)
    return tmp_path / "packed"


def test_a_changed_file_is_refused(packed: Path) -> None:
    data = (packed / "tokens.bin").read_bytes()
    (packed / "tokens.bin").write_bytes(data[:-2])
    with pytest.raises(InputError, match=r"tokens\.bin is missing, cut short or changed"):
        PackedTokens(packed)
    (packed / "tokens.bin").unlink()
    with pytest.raises(InputError, match=r"tokens\.bin is missing"):
        PackedTokens(packed)


def test_a_broken_manifest_is_refused(packed: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    del manifest["dtype"]
    (packed / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="not a manifest of packed tokens"):
        PackedTokens(packed)
    (packed / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        PackedTokens(packed)
    (packed / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no manifest\.json"):
        PackedTokens(packed)


def test_sequences_are_read_as_the_file_has_them(packed: Path) -> None:
    tokens = PackedTokens(packed)
    raw = np.fromfile(packed / "tokens.bin", "<u2").reshape(len(tokens), 32)
    assert tokens[3].dtype == np.int64
    assert np.array_equal(tokens[3], raw[3])
    assert np.array_equal(tokens[-1], raw[-1])
    assert np.array_equal(tokens[2:5], raw[2:5])
    with pytest.raises(IndexError):
        tokens[len(tokens)]


def test_batches_go_on_from_where_they_stopped(packed: Path) -> None:
    tokens = PackedTokens(packed)
    far = 3 * len(tokens) // 4  # batches of 4: nearly three passes over the data
    straight = list(islice(tokens.batches(4, seed=1), far))
    for start in (0, 1, far // 2, far - 1):
        resumed = list(islice(tokens.batches(4, seed=1, start=start), far - start))
        assert np.array_equal(straight[start:], resumed)
    assert straight[0].shape == (4, 32)
    assert straight[0].dtype == np.int64
    assert not np.array_equal(straight[0], next(tokens.batches(4, seed=2)))


def test_every_pass_holds_every_sequence_once_in_an_order_of_its_own(packed: Path) -> None:
    tokens = PackedTokens(packed)
    everything = sorted(tokens[:].tolist())
    passes = [batch.tolist() for batch in islice(tokens.batches(len(tokens), seed=1), 2)]
    assert sorted(passes[0]) == sorted(passes[1]) == everything
    assert passes[0] != passes[1]


MEMORY = textwrap.dedent("""
    import functools, gzip, resource, sys
    import tokenizers
    from statecut.data import packing, sources
    from statecut.data.tokenizer import Tokenizer

    count, folder = int(sys.argv[1]), sys.argv[2]
    with gzip.open(f"{folder}/{count}.jsonl.gz", "wt", compresslevel=1) as file:
        for i in range(count):
            words = " ".join(f"word{i + j:016}" for j in range(500))
            file.write('{"text": "%s"}\\n' % words)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0, "</s>": 1}, unk_token="w"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    packing.shuffled = functools.partial(sources.shuffled, characters=1 << 20)
    packing._BATCH = 1 << 16
    manifest = packing.pack(
        sources.read(f"{folder}/{count}.jsonl.gz"),
        Tokenizer("words", "0", backend, 2, None, 1),
        f"{folder}/{count}",
        sequence_length=128, source=sources.Source("a", "b"), seed=0, workers=2,
    )
    print(manifest.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
""")


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Four times the text: 30 MB more of it, 12 MB more of tokens as the encoder gives them."""
    peaks = []
    for count in (1000, 4000):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(count), tmp_path],
            check=True,
            capture_output=True,
            text=True,
        )
        tokens, peak = map(int, done.stdout.split())
        assert tokens == count * 501 // 128 * 128
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 8 * 1024, peaks  # KiB


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_says_what_is_left_and_only_of_long_work(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
) -> None:
    """On a terminal in a line that changes and goes, elsewhere in a log."""
    caplog.set_level("INFO")
    clock = iter([0.0, 0.1, 10.0, 10.1, 70.0])
    monkeypatch.setattr("statecut.data.progress.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    progress = Progress("packing", tokens=2_000_000)
    for _ in range(4):
        progress.add(documents=500, tokens=500_000)
    last = "packing: 2,000 documents, 2,000,000 tokens, 28,571 tokens/s, 0 s left"
    if terminal:
        first = "packing: 1,000 documents, 1,000,000 tokens, 100,000 tokens/s, 10 s left"
        clear = "\r\x1b[2K"
        assert capsys.readouterr().err == f"{clear}{first}{clear}{last}{clear}"
        assert caplog.messages == []
    else:
        assert caplog.messages == [last]


def files_of_words(folder: Path, counts: dict[str, tuple[int, int]]) -> list[Path]:
    """Files of so many documents from a first word on: each says its own word, ten times."""
    for name, (first, count) in counts.items():
        lines = (json.dumps({"text": " ".join([f"w{first + i}"] * 10)}) for i in range(count))
        (folder / name).write_text("\n".join(lines) + "\n")
    return [folder / name for name in counts]


def test_every_slice_takes_from_all_files_in_proportion(tmp_path: Path) -> None:
    paths = files_of_words(tmp_path, {"a.jsonl": (1000, 300), "b.jsonl": (2000, 100)})
    sizes = {"held_out": 8, "calibration": 40, "train": 200}
    options = {**OPTIONS, "sequence_length": 11}
    pack(read(*paths), words(3000), tmp_path / "out", sequences=sizes, **options)
    seen: set[int] = set()
    for name, size in sizes.items():
        part = PackedTokens(tmp_path / "out", slice_name=name)[:]
        ids = set(part.reshape(-1).tolist()) - {1}
        assert sum(id >= 2000 for id in ids) == size // 4
        assert not ids & seen
        seen |= ids


def test_a_file_that_ends_early_is_made_up_for_by_the_others(tmp_path: Path) -> None:
    paths = files_of_words(tmp_path, {"a.jsonl": (1000, 30), "b.jsonl": (2000, 30)})
    paths[0].write_text(paths[0].read_text() + "\n" * paths[0].stat().st_size)  # no text in it
    options = {**OPTIONS, "sequence_length": 11}
    manifest = pack(read(*paths), words(3000), tmp_path / "out", sequences={"x": 60}, **options)
    ids = set(PackedTokens(tmp_path / "out")[:].reshape(-1).tolist()) - {1}
    assert manifest.sequences == len(ids) == 60
    with pytest.raises(InputError, match="holds 60 sequences of 11 tokens, 61 are needed"):
        pack(read(*paths), words(3000), tmp_path / "more", sequences={"x": 61}, **options)


@given(st.integers(0, 1000), st.lists(st.integers(1, 10**9), min_size=1, max_size=9))
def test_shares_add_up_and_are_within_one_of_the_proportion(size: int, weights: list[int]) -> None:
    shares = packing.apportion(size, weights)
    assert sum(shares) == size
    assert all(
        abs(share * sum(weights) - size * weight) < sum(weights)
        for share, weight in zip(shares, weights, strict=True)
    )
