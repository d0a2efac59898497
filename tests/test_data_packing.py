"""Packed tokens: what is in the file, that it is always the same, and what is refused."""

import json
import os
import random
from itertools import islice

import numpy as np
import pytest
import tokenizers

from reproduction.new_tokenizers import train_tokenizer
from statecut.data import packing
from statecut.data.packing import PackedTokens, pack
from statecut.data.sources import Source, read
from statecut.data.tokenizer import Tokenizer
from statecut.errors import InputError

OPTIONS = {"sequence_length": 16, "source": Source("invented", "1"), "seed": 0}


def documents(count=400, seed=0):
    draw = random.Random(seed)
    words = ["".join(draw.choices("aeinorst", k=draw.randint(1, 7))) for _ in range(500)]
    return [f"{i}: " + " ".join(draw.choices(words, k=draw.randint(1, 80))) for i in range(count)]


def words(size):
    """A tokenizer of `size` ids: the words w2, w3, ... behind bos and eos."""
    vocabulary = {f"w{i}": i for i in range(2, size)} | {"<s>": 0, "</s>": 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer("words", "0", backend, size, bos=0, eos=1)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    return train_tokenizer(documents(), folder, vocabulary_size=600)


def test_every_document_is_there_once_with_eos_behind_it(tmp_path, bpe):
    texts = documents()
    manifest = pack(texts, bpe, tmp_path / "a", **OPTIONS)
    stream = PackedTokens(tmp_path / "a")[:].reshape(-1)
    assert manifest.tokens == len(stream) == manifest.sequences * 16
    ends = np.flatnonzero(stream == bpe.eos)
    decoded = [bpe.backend.decode(part.tolist()) for part in np.split(stream, ends + 1)]
    complete = [texts.index(text.removesuffix("<|endoftext|>")) for text in decoded[:-1]]
    # Less than a sequence is dropped, so only the last document can be cut.
    assert len(texts) - 2 <= len(complete) == len(set(complete))
    assert complete != sorted(complete)
    everything = sum(len(bpe.encode(text)) + 1 for text in texts)
    assert 0 <= everything - len(stream) < 16


def test_a_seed_alone_fixes_the_bytes(tmp_path, bpe, monkeypatch):
    """Neither workers nor batches leave a trace in them."""
    manifest = pack(documents(), bpe, tmp_path / "first", **OPTIONS)
    for size, workers in ((1, 2), (1000, 1), (1000, 5), (1 << 20, 2)):
        monkeypatch.setattr(packing, "_BATCH", size)
        pack(documents(), bpe, tmp_path / f"{size}-{workers}", workers=workers, **OPTIONS)
    for name in ("tokens.bin", "manifest.json"):
        assert len({path.read_bytes() for path in tmp_path.glob(f"*/{name}")}) == 1
    other = pack(documents(), bpe, tmp_path / "other", **{**OPTIONS, "seed": 6})
    assert other.sha256 != manifest.sha256


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_tokens_are_as_wide_as_the_vocabulary_asks(tmp_path, size, dtype):
    tokenizer = words(size)
    text = f"w{size - 1} w2 w{size - 2}"
    manifest = pack([text], tokenizer, tmp_path / "a", **{**OPTIONS, "sequence_length": 4})
    assert manifest.dtype == dtype
    assert (tmp_path / "a" / "tokens.bin").stat().st_size == 4 * int(dtype[4:]) // 8
    assert PackedTokens(tmp_path / "a")[0].tolist() == [size - 1, 2, size - 2, 1]


def test_a_limit_is_met_exactly_and_stops_the_reading(tmp_path, bpe):
    def endless():
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
def test_slices_share_no_document(tmp_path, boundary):
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
    with pytest.raises(InputError, match="no slice 'recovery'; known: calibration, held_out, tr"):
        PackedTokens(tmp_path / "a", slice_name="recovery")


def test_slices_of_one_document_share_no_token(tmp_path):
    text = [" ".join(f"w{i}" for i in range(2, 400))]
    sizes = {"calibration": 5, "held_out": 2}
    with pytest.raises(InputError, match="holds 5 sequences of 16 tokens, 7 are needed"):
        pack(text, words(400), tmp_path / "a", sequences=sizes, **OPTIONS)
    pack(text, words(400), tmp_path / "a", sequences=sizes, share_documents=True, **OPTIONS)
    parts = [PackedTokens(tmp_path / "a", slice_name=name)[:].reshape(-1) for name in sizes]
    assert [part.tolist() for part in parts] == [[*range(2, 82)], [*range(82, 114)]]


def test_a_slice_added_at_the_end_changes_none_before(tmp_path, bpe):
    pack(documents(), bpe, tmp_path / "a", sequences={"x": 9, "y": 30}, **OPTIONS)
    pack(documents(), bpe, tmp_path / "b", sequences={"x": 9, "y": 30, "z": 5}, **OPTIONS)
    before, after = ((tmp_path / name / "tokens.bin").read_bytes() for name in "ab")
    assert after.startswith(before)
    batch = next(PackedTokens(tmp_path / "a", slice_name="y").batches(30, seed=1))
    assert sorted(batch.tolist()) == sorted(PackedTokens(tmp_path / "a")[9:39].tolist())


def test_what_cannot_be_done_is_refused_and_writes_nothing(tmp_path, bpe):
    def untouched():
        pytest.fail("the documents were read")
        yield ""

    def cut_off():
        yield from documents()
        raise InputError("line 401")

    (tmp_path / "file").touch()
    (tmp_path / "there" / "notes").mkdir(parents=True)
    bare = Tokenizer("bare", "0", bpe.backend, 600, bos=None, eos=0)
    for texts, tokenizer, out, options, message in (
        (untouched(), bpe, "file/inside", {}, "cannot be written"),
        (untouched(), bpe, "there", {}, "exists already"),
        (untouched(), bare, "a", {"boundary": "bos"}, "bare has no bos"),
        ([], bpe, "a", {}, "invented: holds 0 sequences of 16 tokens, 1 are needed"),
        (cut_off(), bpe, "a", {"workers": 2}, "line 401"),
    ):
        with pytest.raises(InputError, match=message):
            pack(texts, tokenizer, tmp_path / out, **{**OPTIONS, **options})
    assert {path.name for path in tmp_path.iterdir()} == {"file", "there"}


@pytest.fixture
def packed(tmp_path, bpe):
    pack(documents(), bpe, tmp_path / "packed", **OPTIONS)
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: os.truncate(f / "tokens.bin", 1000), r"tokens\.bin is missing, cut short or ch"),
        (lambda f: (f / "manifest.json").write_text("{}"), "not a manifest of packed tokens"),
        (lambda f: (f / "manifest.json").unlink(), r"no manifest\.json"),
    ],
)
def test_a_damaged_folder_is_refused(packed, damage, message):
    damage(packed)
    with pytest.raises(InputError, match=message):
        PackedTokens(packed)


def test_batches_go_on_from_where_they_stopped(packed):
    """Every pass holds every sequence once, in an order of its own."""
    tokens = PackedTokens(packed)
    far = 3 * len(tokens) // 4  # batches of 4: nearly three passes over the data
    straight = list(islice(tokens.batches(4, seed=1), far))
    for start in (0, 1, far // 2, far - 1):
        resumed = list(islice(tokens.batches(4, seed=1, start=start), far - start))
        assert np.array_equal(straight[start:], resumed)
    assert not np.array_equal(straight[0], next(tokens.batches(4, seed=2)))
    one, two = (batch.tolist() for batch in islice(tokens.batches(len(tokens), seed=1), 2))
    assert sorted(one) == sorted(two) == sorted(tokens[:].tolist())
    assert one != two


def two_files(folder, *counts):
    """Of so many documents: each says its own word, ten times, from w1000 on or from w2000."""
    for number, count in enumerate(counts, 1):
        lines = (json.dumps({"text": f"w{1000 * number + i} " * 10}) for i in range(count))
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return [folder / "1.jsonl", folder / "2.jsonl"]


def test_every_slice_takes_from_all_files_in_proportion(tmp_path):
    paths = two_files(tmp_path, 300, 100)
    sizes = {"held_out": 8, "calibration": 40, "train": 200}
    options = {**OPTIONS, "sequence_length": 11}
    pack(read(*paths), words(3000), tmp_path / "out", sequences=sizes, **options)
    seen = set()
    for name, size in sizes.items():
        part = PackedTokens(tmp_path / "out", slice_name=name)[:]
        ids = set(part.reshape(-1).tolist()) - {1}
        assert sum(id >= 2000 for id in ids) == size // 4
        assert not ids & seen
        seen |= ids


def test_a_file_that_ends_early_is_made_up_for_by_the_others(tmp_path):
    paths = two_files(tmp_path, 30, 30)
    paths[0].write_text(paths[0].read_text() + "\n" * paths[0].stat().st_size)  # no text in it
    options = {**OPTIONS, "sequence_length": 11}
    pack(read(*paths), words(3000), tmp_path / "out", sequences={"x": 60}, **options)
    assert len(set(PackedTokens(tmp_path / "out")[:].reshape(-1).tolist()) - {1}) == 60
    with pytest.raises(InputError, match="holds 60 sequences of 11 tokens, 61 are needed"):
        pack(read(*paths), words(3000), tmp_path / "more", sequences={"x": 61}, **options)
