"""Downloads against a hub on 127.0.0.1: what arrives, what is pinned, and what is refused."""

import errno
import hashlib
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import WeakFileLock

from statecut.errors import InputError
from statecut.hub import FOLDER, LOCK, HubItem, fetch, model_name, read_lock, resolve

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


@pytest.fixture(autouse=True)
def _repositories(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.push("model", "owner/net", NET)
    hub.push("dataset", "owner/text", {"data/a/1.jsonl": b"{}\n", "data/2": b"", "x": b"-"})


def download(*items: HubItem, update: tuple[str, ...] = ()) -> None:
    """`fetch`, with the reasons of all failures in one error."""
    if failures := fetch(items, update=update):
        raise InputError("\n".join(failures.values()))


def pin(item):
    return read_lock()[f"{item.kind}s"][item.name]


def test_a_fresh_download_writes_files_and_lock(hub):
    download(MODEL, DATA)
    commit = hub.branches["model", "owner/net"]["main"]
    home = resolve(*MODEL.key, verify=True)
    assert home == FOLDER / "models" / "owner--net" / commit
    wanted = {name: NET[name] for name in ("config.json", "model.safetensors")}
    assert {path.name: path.read_bytes() for path in home.iterdir()} == wanted
    assert model_name(home) == "owner/net"
    assert model_name(home.parent) == "owner--net"
    data = resolve(*DATA.key, verify=True)
    assert (data / "data/a/1.jsonl").read_bytes() == b"{}\n"
    assert (data / "data/2").read_bytes() == b""
    assert not (data / "x").exists()
    assert (pin(MODEL)["revision"], pin(MODEL)["commit"]) == ("main", commit)
    assert pin(MODEL)["files"] == {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        for name, content in wanted.items()
    }
    assert {path.name for path in FOLDER.iterdir()} == {".lock", "models", "datasets"}


def test_a_lock_alone_brings_the_same_files_to_another_machine(hub):
    download(MODEL)
    hub.requests.clear()
    locked = LOCK.read_text()
    download(MODEL)
    assert hub.requests == []  # all is there
    shutil.rmtree(FOLDER)
    hub.push("model", "owner/net", {"config.json": b"{}", "model.safetensors": b"newer"})
    download(MODEL)
    assert (resolve(*MODEL.key, verify=True) / "model.safetensors").read_bytes() == WEIGHTS
    assert LOCK.read_text() == locked


def test_a_download_that_was_cut_off_goes_on_with_the_files_that_are_missing(hub):
    hub.push("dataset", "owner/text", {"data/a.parquet": b"a", "data/b.parquet": WEIGHTS})
    hub.cut["data/b.parquet"] = 1_000_000
    with pytest.raises(InputError, match=r"dataset owner/text: HfHubHTTPError: .*503"):
        download(DATA)
    assert not [*FOLDER.rglob("b.parquet")]
    assert not LOCK.exists()
    hub.cut.clear()
    download(DATA)
    assert (resolve(*DATA.key, verify=True) / "data/b.parquet").read_bytes() == WEIGHTS
    assert hub.sent["data/a.parquet"] == 1


def test_the_lock_wins_over_a_branch_that_moved_until_updated(hub):
    download(MODEL, DATA)
    first = pin(MODEL)["commit"]
    moved = hub.push("model", "owner/net", NET | {"config.json": b"{}"})
    download(MODEL, DATA)
    assert pin(MODEL)["commit"] == first
    hub.requests.clear()
    download(MODEL, DATA, update=("owner/net",))
    assert pin(MODEL)["commit"] == moved != first
    assert (resolve(*MODEL.key, verify=True) / "config.json").read_bytes() == b"{}"
    assert not [path for path in hub.requests if "owner/text" in path]


def test_another_revision_than_the_locked_one_is_refused(hub):
    hub.push("model", "owner/net", NET, branch="v2")
    download(MODEL)
    other = HubItem("model", "owner/net", "v2")
    message = r"'v2' is wanted, but 'main' is locked.*`statecut download --update owner/net`"
    for refused in (lambda: download(other), lambda: resolve(*other.key, revision="v2")):
        with pytest.raises(InputError, match=message):
            refused()
    resolve(*MODEL.key, revision=pin(MODEL)["commit"])


def test_further_patterns_are_fetched_at_the_locked_commit(hub):
    download(DATA)
    first = pin(DATA)["commit"]
    hub.push("dataset", "owner/text", {"data/2": b"other", "x": b"other"})
    with pytest.raises(InputError, match="its files x are not in"):
        resolve(*DATA.key, patterns=("x",))
    download(HubItem("dataset", "owner/text", patterns=("x",)))
    assert pin(DATA)["commit"] == first
    assert pin(DATA)["patterns"] == ["data/*", "x"]
    assert (resolve(*DATA.key, patterns=("x",)) / "x").read_bytes() == b"-"
    with pytest.raises(InputError, match="matches the pattern 'nothing'"):
        download(HubItem("dataset", "owner/text", patterns=("nothing",)))


def test_an_altered_file_is_refused_by_resolve_and_fixed_by_download(hub):
    download(MODEL)
    config = resolve(*MODEL.key) / "config.json"
    config.write_bytes(NET["config.json"].replace(b"delta", b"gamma"))
    resolve(*MODEL.key)
    with pytest.raises(InputError, match=r"config\.json has not the sha256"):
        resolve(*MODEL.key, verify=True)
    hub.sent.clear()
    download(MODEL)
    assert config.read_bytes() == NET["config.json"]
    assert [*hub.sent] == ["config.json"]
    config.write_bytes(b"{}")
    with pytest.raises(InputError, match=r"config\.json has not the size"):
        resolve(*MODEL.key)
    config.unlink()
    with pytest.raises(InputError, match=r"config\.json is missing: run `statecut download"):
        resolve(*MODEL.key)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_bytes_from_the_hub_are_refused(hub, name):
    """A small file's hash is known only once it is locked."""
    if name == "config.json":
        download(MODEL)
        (resolve(*MODEL.key) / name).unlink()
    hub.spoiled.add(name)
    with pytest.raises(InputError, match=rf"{name} has the sha256 .* deleted"):
        download(MODEL)
    assert not [*FOLDER.rglob(name)]
    hub.spoiled.clear()
    download(MODEL)
    resolve(*MODEL.key, verify=True)


def test_a_model_without_safetensors_is_refused_unless_only_other_files_are_wanted(hub):
    hub.push("model", "owner/old", {"tokenizer.json": b"{}", "pytorch_model.bin": b"a pickle"})
    with pytest.raises(InputError, match=r"old: has no model\*\.safetensors.* save_pretrained"):
        download(HubItem("model", "owner/old"))
    assert not [path for path in hub.requests if "resolve" in path]
    item = HubItem("model", "owner/old", patterns=("tokenizer*",))
    download(item)
    assert (resolve(*item.key) / "tokenizer.json").exists()


def test_one_failing_item_leaves_the_others_complete(hub):
    hub.push("model", "owner/gated", NET)
    hub.gated.add("owner/gated")
    missing, gated = HubItem("model", "owner/nowhere"), HubItem("model", "owner/gated")
    branch = HubItem("dataset", "owner/text", "no-such-branch")
    failures = fetch([missing, gated, branch, MODEL])
    assert "RepositoryNotFoundError: 404" in failures[missing.key]
    assert "GatedRepoError: 403" in failures[gated.key]
    assert "RevisionNotFoundError: 404" in failures[branch.key]
    assert len(failures) == 3
    resolve(*MODEL.key, verify=True)
    with pytest.raises(InputError, match="nowhere was not downloaded here: run `statecut download"):
        resolve(*missing.key)


def test_offline_and_disk_full_are_named(monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for target, name, value, message in (
        ("huggingface_hub.constants", "HF_HUB_OFFLINE", True, "Offline.* unset the `HF_HUB_OFF"),
        ("shutil", "disk_usage", lambda _: SimpleNamespace(free=1_000_000),
         ".* needs 3,000,028 bytes, .* 1,000,000 left"),
        ("os", "fsync", full, "OSError: .*No space left on device"),
        ("huggingface_hub.constants", "ENDPOINT", "http://127.0.0.1:9",
         "offline: the hub cannot be reached"),
    ):  # fmt: skip
        LOCK.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(f"{target}.{name}", value)
            with pytest.raises(InputError, match=f"owner/net: {message}"):
                download(MODEL)


@pytest.mark.parametrize("path", [FOLDER, LOCK])
def test_an_unwritable_place_is_refused_before_any_request(hub, path):
    Path(path.parts[0]).write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        download(MODEL)
    assert hub.requests == []


def test_nothing_is_written_outside_the_folder(hub, tmp_path):
    hub.push("dataset", "owner/text", {"data/../../../../escaped": b"!", "data/2": b""})
    download(DATA)
    assert not [*tmp_path.rglob("escaped")]
    for name in ("../etc", "owner/..", "owner", "owner/a/b"):
        with pytest.raises(InputError, match="must have the form 'owner/name'"):
            HubItem("dataset", name)


def test_two_downloads_into_one_folder_take_turns(hub):
    FOLDER.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with WeakFileLock(FOLDER / ".lock"):
            second = pool.submit(download, MODEL)
            time.sleep(0.3)
            assert hub.requests == []
        second.result(timeout=30)
    resolve(*MODEL.key, verify=True)
    LOCK.write_text("{")
    with pytest.raises(InputError, match=r"revisions\.lock: not valid JSON"):
        resolve(*MODEL.key)
