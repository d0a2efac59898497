"""What `download` says of what it fetched, with one thing wrong at a time."""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation_runs import TEXT, WORDS, demo_data, make_model, write_lines
from hub_server import Hub

from reproduction.config import parse_config
from reproduction.download import download_and_check
from reproduction.new_tokenizers import train_tokenizer
from statecut.cli import main
from statecut.hub import FOLDER, LOCK

ROWS = [
    {"goal": f"to {word}", "sol1": "a key", "sol2": word, "label": i % 2}
    for i, word in enumerate(WORDS[:6])
]
CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: validation
    path: validation.parquet
---
"""
Files = dict[str, bytes]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def settings() -> dict[str, Any]:
    """A run of which everything but the methods is on the hub."""
    data = demo_data()
    data |= {"recipes": {}, "benchmarks": {}, "figures": {}, "recovery": None, "analysis": None}
    data["tokenizers"] = {"words": {"kind": "hub", "name": "owner/words"}}
    web = {"kind": "hub", "name": "owner/web", "files": ["data/*"]}
    data["corpora"] = {"web": {**web, "length": 64, "seed": 0, "slices": {"calibration": 8}}}
    net = {"label": "Net", "architecture": "delta_net", "tokenizer": "words", "vocab_size": 300}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}
    source = {"kind": "hub", "name": "owner/net"}
    data["models"] = {"net": {**net, **sizes, "source": source}}
    data["calibration"] = {"data": "web/calibration", "sequences": 4, "rows": 64}
    task = {"label": "PIQA", "task": "piqa", "metric": "acc_norm", "version": 1}
    suite = {"label": "ZS", "window": 64, "tasks": {"piqa_acc_norm": task}}
    data["evaluation"] = {"protocol": "test", "suites": {"zero_shot": suite}}
    table = {"kind": "by_model", "models": ["net"], "methods": ["drrqr"], "ratios": [0.5]}
    data["tables"] = {"one": {**table, "columns": {"pre": ["zero_shot"]}, "caption": "One."}}
    return data


PARAMETERS = f"{parse_config(settings(), '').models['net'].parameters:,} parameters"


@dataclass
class World:
    """A hub, and what is on it."""

    hub: Hub
    net: Files
    web: Files
    piqa: Files
    words: Files
    settings: dict[str, Any] = field(default_factory=settings)

    def download(self) -> tuple[str, str]:
        """The table, and what is wrong, of a first download."""
        LOCK.unlink(missing_ok=True)
        for kind, name, files in (
            ("model", "owner/net", self.net),
            ("model", "owner/words", self.words),
            ("dataset", "owner/web", self.web),
            ("dataset", "baber/piqa", self.piqa),
        ):
            self.hub.push(kind, name, files)
        return download_and_check(parse_config(self.settings, "test.yaml"))

    def table(self) -> str:
        table, problems = self.download()
        assert problems == ""
        return table

    def problem(self) -> str:
        _, problems = self.download()
        assert problems
        return problems


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_model(folder)
    return folder


@pytest.fixture
def world(made: Path, hub: Hub) -> World:
    net, words = (
        {path.name: path.read_bytes() for path in (made / name).iterdir()}
        for name in ("model", "tokenizer")
    )
    web = {f"data/{i}.parquet": parquet([{"text": TEXT}] * (i + 1)) for i in range(2)}
    piqa = {"README.md": CARD, "validation.parquet": parquet(ROWS)}
    return World(hub, net, web, piqa, words)


def test_what_is_there_is_said_in_a_table(world: World) -> None:
    table = world.table()
    commits = {name: branch["main"][:8] for (_, name), branch in world.hub.branches.items()}
    assert [line.split() for line in table.splitlines()] == [
        line.split()
        for line in (
            "item commit content",
            f"tokenizer words {commits['owner/words']} 300 tokens",
            f"model net {commits['owner/net']} 2 layers, 2 heads of 16, {PARAMETERS}; "
            "its own tokenizer is words",
            f"corpus web {commits['owner/web']} 2 files, 3 rows",
            f"task piqa {commits['baber/piqa']} 6 documents",
        )
    ]


def test_a_model_of_other_sizes(world: World) -> None:
    world.settings["models"]["net"]["num_heads"] = 4
    message = world.problem()
    assert re.search(r"model net: .* has head_k_dim 16, the configuration says 8 for Net", message)


def test_another_tokenizer(world: World, tmp_path: Path) -> None:
    train_tokenizer([TEXT[::-1]], tmp_path / "other", vocabulary_size=300)
    world.net["tokenizer.json"] = (tmp_path / "other" / "tokenizer.json").read_bytes()
    message = world.problem()
    assert re.search(
        r"model net: .*: its own tokenizer is not words, which the run gives it:", message
    )
    assert re.search(r"\d+ tokens and texts have other ids, '", message)


def test_the_same_tokens_cut_otherwise(world: World) -> None:
    own = json.loads(world.net["tokenizer.json"])
    own["pre_tokenizer"]["add_prefix_space"] = True
    world.net["tokenizer.json"] = json.dumps(own).encode()
    assert "texts have other ids, 'The state of a linear model keeps" in world.problem()


def test_text_that_cannot_be_read(world: World) -> None:
    whole = world.web["data/1.parquet"]
    world.web["data/1.parquet"] = whole[:-20]
    assert re.search(r"corpus web: .*1\.parquet.* footer", world.problem())
    world.settings["corpora"]["web"]["text_field"] = "content"
    world.web["data/1.parquet"] = whole
    assert "0.parquet: no column 'content'; it has text" in world.problem()


def test_a_file_that_breaks_off_leaves_the_rest_checked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    world.hub.cut["data/1.parquet"] = 1000
    table, message = world.download()
    assert re.search(r"corpus web +not downloaded", table)
    assert "not downloaded (run the same command again" in message
    assert "dataset owner/web: HfHubHTTPError: " in message
    assert "503" in message
    assert "downloaded, but" not in message
    assert "6 documents" in table


def test_models_without_a_configuration(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.hub.push("model", "owner/net", world.net)
    world.hub.push("model", "owner/other", world.net | {"config.json": b'{"model_type": "llama"}'})
    assert main(["download", "owner/net", "owner/other"]) == 0
    net, other = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"owner/net at \w{{8}}: 2 layers, 2 heads of 16, {PARAMETERS}", net)
    assert other.endswith("model_type 'llama' is none that Statecut knows: only its hashes are "
                          "checked")  # fmt: skip
    moved = world.hub.push("model", "owner/net", world.net)
    assert main(["download", "owner/net"]) == main(["download", "--update", "owner/net"]) == 0
    before, after = capsys.readouterr().out.splitlines()
    assert f" at {moved[:8]}: " in after
    assert before == net
    assert main(["download", "owner/net", "owner/none"]) == 2
    message = capsys.readouterr().err
    assert "goes on from here):\n  model owner/none: RepositoryNotFoundError" in message


def test_a_local_file_stands_in_for_a_dead_data_set(world: World, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "piqa.jsonl", ROWS[:5])
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    task = world.settings["evaluation"]["suites"]["zero_shot"]["tasks"]["piqa_acc_norm"]
    task |= {"file": str(file), "sha256": digest}
    table = world.table()
    line = table.splitlines()[-1]
    assert re.fullmatch(
        rf"task piqa +local +5 documents \(piqa: from {file}, {digest[:12]}\)", line
    )
    assert not [path for path in world.hub.requests if "piqa" in path]
    write_lines(file, ROWS)
    assert f"the configuration says {digest} for piqa" in world.problem()


def test_of_a_model_that_is_only_timed_the_config_is_fetched_and_compared(world: World) -> None:
    source = {"kind": "hub", "name": "owner/big"}
    big = {**world.settings["models"]["net"], "label": "Big", "source": source}
    world.settings["models"]["big"] = big
    world.settings["benchmarks"] = {
        "model": {"kind": "model", "models": ["big"], "ratios": [0.5], "passes": ["forward"],
                  "batch": 1, "length": 64}
    }  # fmt: skip
    files = {"config.json": world.net["config.json"], "model.safetensors": b"never asked for"}
    world.hub.push("model", "owner/big", files)
    table = world.table()
    assert "only timed, without its weights" in table
    assert not list((FOLDER / "models" / "owner--big").rglob("*.safetensors"))
    big["num_heads"] = 4
    assert "model big: " in (message := world.problem())
    assert "head_k_dim 16, the configuration says 8 for Big" in message


def test_under_the_papers_protocol_a_data_set_has_its_number_of_documents(world: World) -> None:
    world.settings["evaluation"]["protocol"] = "paper"
    message = world.problem()
    assert "task piqa: 6 documents, and the paper's protocol has 1,838" in message
