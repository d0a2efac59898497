"""A configuration's corpora and tokenizers, from each of the places they can come from."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reproduction.config import load_config, parse_config
from reproduction.corpora import documents, make_tokenizer, pack_corpus
from statecut.data.packing import PackedTokens
from statecut.data.tokenizer import load_tokenizer
from statecut.hub import HubItem, fetch

CONFIG = Path(__file__).parents[1] / "config"
TEXTS = [f"Sentence number {i} has some words in it, and {i * i} is a square." for i in range(300)]


def configured(corpus, tokenizer=None):
    """The demo with another corpus (and tokenizer)."""
    data = load_config(CONFIG / "demo.yaml").model_dump(mode="json")
    sizes = {"length": 16, "seed": 3, "slices": dict.fromkeys(SLICES, 20)}
    data["corpora"] = {name: {**corpus, **sizes} for name in data["corpora"]}
    for recipe in data["recipes"].values():
        recipe |= {"steps": 1, "batch": 4, "warmup": 0}
    data["calibration"] |= {"sequences": 5, "rows": 50}
    data["recovery"] |= {"steps": 1, "batch": 4, "warmup": 0}
    data["analysis"] |= {"skip": 2}
    for figure in data["figures"].values():
        if "tokens" in figure:
            figure["tokens"] = 10
    if tokenizer is not None:
        data["tokenizers"]["demo"] = tokenizer
    else:
        data["tokenizers"]["demo"]["vocab_size"] = 300
    return parse_config(data, "test")


SLICES = ("tasks", "sequences", "recovery", "pretraining")


def packed(config, root):
    tokenizer = make_tokenizer(config, "demo", root / "tokenizer")
    pack_corpus(config, "documentation", tokenizer, root / "tokens")
    return PackedTokens(root / "tokens")


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A file of text below the working directory, as local corpora are given."""
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    Path("text/a.txt").write_text("\n\n\n".join(TEXTS))
    return {"kind": "local", "files": ["text/*.txt"]}


def test_local_text_with_a_tokenizer_trained_on_it(text, tmp_path):
    config = configured(text)
    tokens = packed(config, tmp_path)
    assert len(tokens) == 80
    assert tokens.manifest.source.revision.startswith("sha256:")
    assert {len(PackedTokens(tmp_path / "tokens", slice_name=name)) for name in SLICES} == {20}


def test_a_file_that_two_patterns_match_is_read_once(text):
    config = configured({"kind": "local", "files": ["text/*.txt", "text/a*.txt"]})
    assert list(documents(config.corpora["documentation"])) == TEXTS


def test_a_local_tokenizer_folder_is_copied(text, tmp_path):
    packed(configured(text), tmp_path)
    again = configured(text, {"kind": "local", "path": "tokenizer"})
    copied = make_tokenizer(again, "demo", tmp_path / "copy")
    assert copied.digest == load_tokenizer(tmp_path / "tokenizer").digest


def test_hub_text_and_tokenizer_at_their_commit(hub, text, tmp_path):
    packed(configured(text), tmp_path)  # a tokenizer to put on the hub
    wanted, other = tmp_path / "wanted.parquet", tmp_path / "other.parquet"
    pq.write_table(pa.table({"text": TEXTS}), wanted)
    pq.write_table(pa.table({"text": ["not this"] * 9}), other)
    files = {"sample/a.parquet": wanted.read_bytes(), "rest/b.parquet": other.read_bytes()}
    commit = hub.push("dataset", "owner/text", files)
    hub.push("model", "owner/words", tmp_path / "tokenizer")
    items = [
        HubItem("dataset", "owner/text", patterns=("sample/*", "rest/*")),
        HubItem("model", "owner/words", patterns=("*token*",)),
    ]
    assert fetch(items) == {}
    corpus = {"kind": "hub", "name": "owner/text", "files": ["sample/*"]}
    config = configured(corpus, {"kind": "hub", "name": "owner/words"})
    tokens = packed(config, tmp_path / "again")
    assert tokens.manifest.source.revision == commit
    # The same documents as in the local file, and none of the data set's other files.
    assert np.array_equal(tokens[:], PackedTokens(tmp_path / "tokens")[:])
