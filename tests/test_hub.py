"""Downloads against a hub on 127.0.0.1: what arrives, what is pinned, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import Hub
from huggingface_hub.utils import WeakFileLock

from statecut.errors import InputError
from statecut.hub.downloads import Downloads, HubItem
from statecut.hub.fetch import fetch

MODEL = HubItem("model", "owner/net")
DATA = HubItem("dataset", "owner/text", patterns=("data/*",))
WEIGHTS = random.Random(0).randbytes(3_000_000)
NET = {
    "config.json": b'{"model_type": "delta_net"}\n',
    "model.safetensors": WEIGHTS,
    "modeling_net.py": b"raise SystemExit",
    "training_args.bin": b"a pickle",
    "pytorch_model.bin": b"the same weights, pickled",
    "checkpoint-1/model.safetensors": b"older weights",
}


@dataclass(frozen=True)
class Desk:
    """A hub, and a place to download to."""

    hub: Hub
    folder: Path
    lock: Path

    @property
    def downloads(self) -> Downloads:
        return Downloads(self.folder, self.lock)

    def download(self, *items: HubItem, update: tuple[str, ...] = ()) -> None:
        """`fetch`, with the reasons of all failures in one error."""
        failures = fetch(items, self.downloads, update=update, endpoint=self.hub.url)
        if failures:
            raise InputError("\n".join(failures.values()))

    def resolve(self, item: HubItem, **options: Any) -> Path:
        return self.downloads.resolve(*item.key, **options)

    def pin(self, item: HubItem) -> dict[str, Any]:
        return json.loads(self.lock.read_text())[f"{item.kind}s"][item.name]

    def files(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*")}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    # The only hub in reach is our own, so that neither a switched-off hub nor a proxy may apply.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub() as hub:
        hub.push("model", "owner/net", NET)
        hub.push("dataset", "owner/text", {"data/a/1.jsonl": b"{}\n", "data/2": b"", "x": b"-"})
        yield Desk(hub, tmp_path / "hub", tmp_path / "config" / "revisions.lock")


def pickled(value: object, **options: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def test_a_fresh_download_writes_files_and_lock(desk: Desk) -> None:
    desk.download(MODEL, DATA)
    commit = desk.hub.branches["model", "owner/net"]["main"]
    home = desk.resolve(MODEL, verify=True)
    assert home == desk.folder / "models" / "owner--net" / commit
    assert {path.name: path.read_bytes() for path in home.iterdir()} == {
        name: NET[name] for name in ("config.json", "model.safetensors")
    }
    data = desk.resolve(DATA, verify=True)
    assert (data / "data/a/1.jsonl").read_bytes() == b"{}\n"
    assert (data / "data/2").read_bytes() == b""
    assert not (data / "x").exists()
    pin = desk.pin(MODEL)
    assert (pin["revision"], pin["commit"]) == ("main", commit)
    assert pin["files"] == {
        name: {"sha256": hashlib.sha256(NET[name]).hexdigest(), "size": len(NET[name])}
        for name in ("config.json", "model.safetensors")
    }
    assert {path.name for path in desk.folder.iterdir()} == {".lock", "models", "datasets"}


def test_a_second_download_asks_the_hub_nothing_and_leaves_the_lock_untouched(desk: Desk) -> None:
    desk.download(MODEL, DATA)
    desk.hub.requests.clear()
    before = desk.lock.stat().st_mtime_ns
    desk.download(MODEL, DATA)
    assert desk.hub.requests == []
    assert desk.lock.stat().st_mtime_ns == before


def test_a_lock_alone_brings_the_same_files_to_another_machine(desk: Desk) -> None:
    desk.download(MODEL)
    locked = desk.lock.read_text()
    shutil.rmtree(desk.folder)
    desk.hub.push("model", "owner/net", {"config.json": b"{}", "model.safetensors": b"newer"})
    desk.download(MODEL)
    assert (desk.resolve(MODEL, verify=True) / "model.safetensors").read_bytes() == WEIGHTS
    assert desk.lock.read_text() == locked


def test_a_download_that_was_cut_off_goes_on_with_the_files_that_are_missing(desk: Desk) -> None:
    desk.hub.push("dataset", "owner/text", {"data/a.parquet": b"a", "data/b.parquet": WEIGHTS})
    desk.hub.cut["data/b.parquet"] = 1_000_000
    with pytest.raises(InputError, match=r"dataset owner/text: HfHubHTTPError: .*503"):
        desk.download(DATA)
    assert "b.parquet" not in desk.files()
    assert not desk.lock.exists()
    desk.hub.cut.clear()
    desk.download(DATA)
    assert (desk.resolve(DATA, verify=True) / "data/b.parquet").read_bytes() == WEIGHTS
    assert desk.hub.sent["data/a.parquet"] == 1


def test_the_lock_wins_over_a_branch_that_moved_until_updated(desk: Desk) -> None:
    desk.download(MODEL, DATA)
    first = desk.pin(MODEL)["commit"]
    moved = desk.hub.push("model", "owner/net", NET | {"config.json": b"{}"})
    desk.download(MODEL, DATA)
    assert desk.pin(MODEL)["commit"] == first
    desk.hub.requests.clear()
    desk.download(MODEL, DATA, update=("owner/net",))
    assert desk.pin(MODEL)["commit"] == moved != first
    assert (desk.resolve(MODEL, verify=True) / "config.json").read_bytes() == b"{}"
    assert not [path for path in desk.hub.requests if "owner/text" in path]


def test_an_update_must_name_a_known_item(desk: Desk) -> None:
    with pytest.raises(InputError, match=r"owner/nett.*did you mean 'owner/net'\?"):
        desk.download(MODEL, update=("owner/nett",))


def test_another_revision_than_the_locked_one_is_refused(desk: Desk) -> None:
    desk.hub.push("model", "owner/net", NET, branch="v2")
    desk.download(MODEL)
    other = HubItem("model", "owner/net", "v2")
    for refused in (lambda: desk.download(other), lambda: desk.resolve(other, revision="v2")):
        with pytest.raises(InputError, match=r"'v2' is wanted, but 'main' is locked.*--update"):
            refused()
    desk.resolve(MODEL, revision=desk.pin(MODEL)["commit"])
    with pytest.raises(InputError, match="revisions 'main' and 'v2'"):
        desk.download(MODEL, other)


def test_further_patterns_are_fetched_at_the_locked_commit(desk: Desk) -> None:
    desk.download(DATA)
    first = desk.pin(DATA)["commit"]
    desk.hub.push("dataset", "owner/text", {"data/2": b"other", "x": b"other"})
    with pytest.raises(InputError, match="its files x are not in"):
        desk.resolve(DATA, patterns=("x",))
    desk.download(HubItem("dataset", "owner/text", patterns=("x",)))
    assert desk.pin(DATA)["commit"] == first
    assert desk.pin(DATA)["patterns"] == ["data/*", "x"]
    assert (desk.resolve(DATA, patterns=("x",)) / "x").read_bytes() == b"-"
    with pytest.raises(InputError, match="matches the pattern 'nothing'"):
        desk.download(HubItem("dataset", "owner/text", patterns=("nothing",)))


def test_an_altered_file_is_refused_by_resolve_and_fixed_by_download(desk: Desk) -> None:
    desk.download(MODEL)
    config = desk.resolve(MODEL) / "config.json"
    config.write_bytes(NET["config.json"].replace(b"delta", b"gamma"))
    desk.resolve(MODEL)
    with pytest.raises(InputError, match=r"config\.json has not the sha256"):
        desk.resolve(MODEL, verify=True)
    desk.hub.sent.clear()
    desk.download(MODEL)
    assert config.read_bytes() == NET["config.json"]
    assert [*desk.hub.sent] == ["config.json"]
    config.write_bytes(b"{}")
    with pytest.raises(InputError, match=r"config\.json has not the size"):
        desk.resolve(MODEL)
    config.unlink()
    with pytest.raises(InputError, match=r"config\.json is missing: run `statecut download"):
        desk.resolve(MODEL)


def test_wrong_bytes_from_the_hub_are_refused(desk: Desk) -> None:
    desk.hub.spoiled.add("model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors has the sha256 .* deleted"):
        desk.download(MODEL)
    assert "model.safetensors" not in desk.files()
    assert not desk.lock.exists()
    desk.hub.spoiled.clear()
    desk.download(MODEL)
    desk.resolve(MODEL, verify=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_model_is_converted_once(desk: Desk, zipped: bool) -> None:
    import torch
    from safetensors.torch import load_file

    table = torch.arange(12.0).reshape(3, 4)
    state = {"embed": table, "head": table, "turned": table.T, "row": table[1], "b": table.half()}
    state["parameter"] = torch.nn.Parameter(table)
    source = pickled(state, _use_new_zipfile_serialization=zipped)
    desk.hub.push("model", "owner/old", {"config.json": b"{}", "pytorch_model.bin": source})
    item = HubItem("model", "owner/old")
    desk.download(item)
    home = desk.resolve(item, verify=True)
    assert {path.name for path in home.iterdir()} == {"config.json", "model.safetensors"}
    loaded = load_file(home / "model.safetensors")
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert desk.pin(item)["files"]["model.safetensors"]["converted_from"] == {
        "path": "pytorch_model.bin",
        "sha256": hashlib.sha256(source).hexdigest(),
        "size": len(source),
    }
    desk.hub.requests.clear()
    desk.download(item)
    assert desk.hub.requests == []
    desk.download(item, update=(item.name,))
    assert not [path for path in desk.hub.requests if "resolve" in path]

    # Damaged, it is made again from the same pickle, to the same bytes.
    (home / "model.safetensors").write_bytes(b"damaged")
    desk.download(item)
    desk.resolve(item, verify=True)


def test_a_sharded_pickled_model_is_converted_shard_by_shard(desk: Desk) -> None:
    import torch
    from safetensors.torch import load_file

    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    index = {"metadata": {"total_size": 32}, "weight_map": {"a": shards[0], "b": shards[1]}}
    files = {
        "config.json": b"{}",
        "pytorch_model.bin.index.json": json.dumps(index).encode(),
        shards[0]: pickled({"a": torch.zeros(4)}),
        shards[1]: pickled({"b": torch.ones(4)}),
    }
    desk.hub.push("model", "owner/old", files)
    item = HubItem("model", "owner/old")
    desk.download(item)
    home = desk.resolve(item, verify=True)
    written = json.loads((home / "model.safetensors.index.json").read_text())
    assert written["metadata"] == index["metadata"]
    assert written["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert torch.equal(load_file(home / written["weight_map"]["b"])["b"], torch.ones(4))
    assert not list(desk.folder.rglob("*.bin"))


@dataclass
class Touch:
    """Unpickled without care, it makes a file."""

    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    desk: Desk, tmp_path: Path, zipped: bool
) -> None:
    trap = tmp_path / "it-ran"
    source = pickled({"a": Touch(trap)}, _use_new_zipfile_serialization=zipped)
    desk.hub.push("model", "owner/evil", {"config.json": b"{}", "pytorch_model.bin": source})
    with pytest.raises(InputError, match=r"owner/evil: pytorch_model\.bin is refused"):
        desk.download(HubItem("model", "owner/evil"))
    assert not trap.exists()
    assert not list(desk.folder.rglob("*.bin")) + list(desk.folder.rglob("*.safetensors"))


def test_a_pickle_without_a_table_of_tensors_is_refused(desk: Desk) -> None:
    contents = [pickled({"model": {"a": 1}}), pickled([1]), pickled({"a": 1})[:-40], b"no pickle"]
    names = [f"owner/odd-{number}" for number in range(len(contents))]
    for name, content in zip(names, contents, strict=True):
        desk.hub.push("model", name, {"config.json": b"{}", "pytorch_model.bin": content})
    with pytest.raises(InputError) as caught:
        desk.download(*(HubItem("model", name) for name in names))
    for name in names:
        assert f"model {name}: pytorch_model.bin is refused" in str(caught.value)
    assert "model.safetensors" not in desk.files()


def test_a_model_without_weights_is_refused_unless_only_other_files_are_wanted(desk: Desk) -> None:
    desk.hub.push("model", "owner/words", {"tokenizer.json": b"{}"})
    with pytest.raises(InputError, match="owner/words: has no weights"):
        desk.download(HubItem("model", "owner/words"))
    item = HubItem("model", "owner/words", patterns=("tokenizer*",))
    desk.download(item)
    assert (desk.resolve(item) / "tokenizer.json").exists()


def test_what_is_not_in_the_lock_is_named_with_the_command(desk: Desk) -> None:
    with pytest.raises(InputError, match=r"owner/net is not in .*\.lock: run `statecut download"):
        desk.resolve(MODEL)


def test_one_failing_item_leaves_the_others_complete(desk: Desk) -> None:
    desk.hub.push("model", "owner/gated", NET)
    desk.hub.gated.add("owner/gated")
    missing, gated = HubItem("model", "owner/nowhere"), HubItem("model", "owner/gated")
    branch = HubItem("dataset", "owner/text", "no-such-branch")
    with pytest.raises(InputError) as caught:
        desk.download(missing, gated, branch, MODEL)
    message = str(caught.value)
    assert "model owner/nowhere: RepositoryNotFoundError: 404" in message
    assert "model owner/gated: GatedRepoError: 403" in message
    assert "Cannot access gated repo" in message
    assert "dataset owner/text: RevisionNotFoundError: 404" in message
    desk.resolve(MODEL, verify=True)


def test_offline_and_disk_full_are_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(InputError, match=r"owner/net: Offline.* unset the `HF_HUB_OFFLINE`"):
            desk.download(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        with pytest.raises(InputError, match=r"net: .* needs 3,000,028 bytes, .* 1,000,000 left"):
            desk.download(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"owner/net: OSError: .*No space left on device"):
            desk.download(MODEL)
    with pytest.raises(InputError, match="owner/net: offline: the hub cannot be reached"):
        replace(desk, hub=SimpleNamespace(url="http://127.0.0.1:9")).download(MODEL)


def test_an_unwritable_folder_is_refused_before_any_request(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        replace(desk, folder=tmp_path / "file" / "hub").download(MODEL)
    with pytest.raises(InputError, match="cannot be written"):
        replace(desk, lock=tmp_path / "file" / "lock").download(MODEL)
    assert desk.hub.requests == []


def test_nothing_is_written_outside_the_folder(desk: Desk, tmp_path: Path) -> None:
    desk.hub.push("dataset", "owner/text", {"data/../../../../escaped": b"!", "data/2": b""})
    desk.download(DATA)
    assert not [*tmp_path.rglob("escaped")]
    for name in ("../etc", "owner/..", "owner", "owner/a/b"):
        with pytest.raises(InputError, match="must have the form 'owner/name'"):
            HubItem("dataset", name)


def test_two_downloads_into_one_folder_take_turns(desk: Desk) -> None:
    with ThreadPoolExecutor() as pool:
        desk.folder.mkdir()
        with WeakFileLock(desk.folder / ".lock"):
            second = pool.submit(desk.download, MODEL)
            time.sleep(0.3)
            assert desk.hub.requests == []
        second.result(timeout=30)
    desk.resolve(MODEL, verify=True)


@pytest.mark.parametrize("content", ["{", "[]", '{"models": {"owner/net": {}}}'])
def test_a_damaged_lock_is_an_error_that_names_it(desk: Desk, content: str) -> None:
    desk.lock.parent.mkdir()
    desk.lock.write_text(content)
    with pytest.raises(InputError, match=r"revisions\.lock"):
        desk.resolve(MODEL)


def test_resolving_needs_neither_the_hub_client_nor_torch(desk: Desk) -> None:
    desk.download(MODEL)
    script = (
        "import sys; from pathlib import Path; from statecut.hub.downloads import Downloads; "
        f"downloads = Downloads(Path({str(desk.folder)!r}), Path({str(desk.lock)!r})); "
        "downloads.resolve('model', 'owner/net', verify=True); "
        "print(sorted({'torch', 'huggingface_hub', 'httpx'} & set(sys.modules)))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
