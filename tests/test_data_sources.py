"""Documents as a stream: what is read, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from reproduction.config.sources import matching
from statecut.data import sources
from statecut.data.sources import (
    at_even_distances,
    describe,
    read,
    shuffled,
)
from statecut.errors import InputError

DOCUMENTS = ["One day.\n\nThe next.", "Ünïcode  and two spaces", "third 🤖"]


def jsonl(documents: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({field: text}).encode() + b"\n" for text in documents)


def zstd(data: bytes) -> bytes:
    # Two frames, as parallel compressors write them.
    middle = len(data) // 2
    codec = pyarrow.Codec("zstd")
    return b"".join(bytes(codec.compress(part)) for part in (data[:middle], data[middle:]))


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_compression_holds_the_same_documents(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](jsonl(DOCUMENTS)))
    (tmp_path / f"a.txt{suffix}").write_bytes(
        COMPRESS[suffix]("\n\n\n".join(DOCUMENTS).encode() + b"\n")
    )
    assert list(read(tmp_path / f"a.jsonl{suffix}")) == DOCUMENTS
    assert list(read(tmp_path / f"a.txt{suffix}")) == DOCUMENTS


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_compressed_file_cut_short_is_an_error_and_not_an_early_end(
    tmp_path: Path, suffix: str
) -> None:
    noise = random.Random(0)
    data = COMPRESS[suffix](jsonl([str(noise.random()) for _ in range(20_000)]))
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"a\.jsonl.*after line"):
        list(read(file))


def test_one_blank_line_is_a_paragraph_and_two_end_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\n\n\nfirst\n\n  still first\n\n\n\nsecond\n \n\t\nthird\r\n\n\n")
    assert list(read(file)) == ["first\n\n  still first", "second", "third"]


def test_a_text_without_document_ends_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_LONGEST_DOCUMENT", 1000)
    file = tmp_path / "a.txt"
    file.write_text("one line\n\n" * 500)
    with pytest.raises(InputError, match="two blank lines end a document"):
        list(read(file))


def test_a_folder_in_the_hubs_form_is_read_whole(tmp_path: Path) -> None:
    texts = [f"document {i:04}" for i in range(2000)]
    (tmp_path / "data").mkdir()
    (tmp_path / ".cache").mkdir()
    for shard in (1, 0):
        table = pyarrow.table({"id": range(1000), "content": texts[shard * 1000 :][:1000]})
        parquet.write_table(table, tmp_path / "data" / f"train-{shard:05}.parquet")
    (tmp_path / "README.md").write_text("A data set.")
    (tmp_path / "data").rename(tmp_path / "train.parquet")
    (tmp_path / ".cache" / "left-over.parquet").write_text("not a parquet file")
    assert sorted(read(tmp_path, field="content")) == texts
    with pytest.raises(InputError, match=r"no column 'text'; it has id, content"):
        read(tmp_path)


def largest_gap(visited: list[int], count: int) -> int:
    return max(after - before for before, after in pairwise([-1, *sorted(visited), count]))


@given(st.integers(1, 2000), st.integers(0, 2**32), st.data())
def test_every_stretch_of_the_order_is_spread_over_all_of_it(
    count: int, seed: int, data: st.DataObject
) -> None:
    order = at_even_distances(count, seed)
    assert sorted(order) == list(range(count))
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    assert largest_gap(order[start:stop], count) * (stop - start) < 3 * count
    # The order is part of what makes packed bytes the same on every machine.
    assert at_even_distances(12, 0) == [10, 2, 7, 4, 9, 1, 6, 11, 3, 8, 0, 5]


def write_parquet(folder: Path, names: list[int], groups: dict[int, list[list[str]]]) -> None:
    """Files in the order of `names`, each with its row groups."""
    schema = pyarrow.schema({"text": pyarrow.string()})
    for name in names:
        with parquet.ParquetWriter(folder / f"{name:03}.parquet", schema) as file:
            for texts in groups[name]:
                file.write_table(pyarrow.table({"text": texts}, schema))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=6),
    st.integers(0, 99),
    st.integers(1, 8),
    st.randoms(),
)
def test_every_document_of_every_row_group_comes_once(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    seed: int,
    side_by_side: int,
    shuffle: random.Random,
) -> None:
    groups = {
        file: [[f"{file} {group} {row}" for row in range(size)] for group, size in enumerate(rows)]
        for file, rows in enumerate(sizes)
    }
    orders = []
    for names in (list(groups), shuffle.sample(list(groups), len(groups))):
        folder = tmp_path_factory.mktemp("set")
        write_parquet(folder, names, groups)
        with mock.patch.object(sources, "_SIDE_BY_SIDE", side_by_side):
            orders.append(list(read(folder, seed=seed)))
    everything = [text for rows in groups.values() for texts in rows for text in texts]
    assert sorted(orders[0]) == sorted(everything)
    assert orders[0] == orders[1]  # whichever file was written first


def test_a_pattern_may_be_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl"):
        (tmp_path / "text" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "text" / name).touch()
    monkeypatch.chdir(tmp_path)
    assert matching("text/*.txt") == [Path("text/a.txt"), Path("text/b.txt")]
    assert matching(f"../{tmp_path.name}/text/c*") == [Path("..", tmp_path.name, "text/c.jsonl")]
    assert matching(f"{tmp_path}/**/*.txt") == [tmp_path / "text/a.txt", tmp_path / "text/b.txt"]


def test_a_source_is_known_by_its_bytes(tmp_path: Path) -> None:
    for folder, documents in (("a", DOCUMENTS), ("b", DOCUMENTS), ("c", DOCUMENTS[::-1])):
        (tmp_path / folder / "set").mkdir(parents=True)
        (tmp_path / folder / "set" / "x.jsonl").write_bytes(jsonl(documents))
    sources = [describe(tmp_path / folder / "set") for folder in "abc"]
    assert sources[0] == sources[1] != sources[2]
    assert describe(tmp_path / "a" / "set" / "x.jsonl").revision == sources[0].revision
    both = [tmp_path / "a" / "set" / "x.jsonl", tmp_path / "c" / "set"]
    assert describe(*both).name == "x.jsonl, set"
    assert describe(*both) != describe(*both[::-1])
    assert list(read(*both)) == DOCUMENTS + DOCUMENTS[::-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "b\n', r"a\.jsonl, line 2: not valid JSON"),
        (b'{"text": "a"}\n\n{"body": "b"}\n', r"a\.jsonl, line 3: no field 'text'; it has body"),
        (b'{"text": "a"}\n["b"]\n', r"line 2: a JSON object was expected"),
        (b'{"text": null}\n', r"line 1: field 'text' is NoneType, not a string"),
        (b'{"text": "\\ud800"}\n', r"line 1: field 'text' is not Unicode"),
        (b'{"text": "\xff"}\n', r"line 1: not valid JSON"),
        (b"", "the file is empty"),
    ],
)
def test_a_broken_jsonl_is_named_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read(file))


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None]}), file, row_group_size=1)
    with pytest.raises(InputError, match=r"a\.parquet, row group 1: field 'text' is NoneType"):
        list(read(file))
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), file)
    whole = file.read_bytes()
    file.write_bytes(whole[:4] + bytes(40) + whole[44:])
    with pytest.raises(InputError, match=r"a\.parquet, row group 0"):
        list(read(file))
    file.write_bytes(whole[:-10])
    with pytest.raises(InputError, match=r"a\.parquet"):
        read(file)
    parquet.write_table(pyarrow.table({"text": [" ", "\n"]}), file, row_group_size=1)
    assert not list(read(file))


def test_what_can_be_known_before_reading_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("x")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "a.jsonl").write_text("{}")
    (tmp_path / "both" / "a.parquet").write_text("x")
    (tmp_path / "none").mkdir()
    for name, message in [
        ("a.pdf", "expected .jsonl or .txt"),
        ("empty.jsonl", "is empty"),
        ("both", "perhaps the same text twice"),
        ("none", "no .parquet or .jsonl"),
        ("missing", "no such file"),
    ]:
        with pytest.raises(InputError, match=message):
            read(tmp_path / name)


def test_shuffling_keeps_every_document_and_holds_few() -> None:
    taken = 0

    def source() -> list[str]:
        nonlocal taken
        for i in range(3000):
            taken = i + 1
            yield f"{i:010}"

    order, ahead = [], 0
    for passed, text in enumerate(shuffled(source(), 7, characters=1000), start=1):
        ahead = max(ahead, taken - passed)
        order.append(text)
    documents = [f"{i:010}" for i in range(3000)]
    assert sorted(order) == documents != order
    assert ahead <= 100
    assert order == list(shuffled(documents, 7, characters=1000))
    assert order != list(shuffled(documents, 8, characters=1000))
    # With room for all of them the first may come last.
    assert max(map(documents.index, list(shuffled(documents, 7))[:30])) > 2000
