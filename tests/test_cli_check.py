"""`reproduction check` and `download` ask the configuration what it needs from the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from reproduction.cli import main
from reproduction.config import load_config
from reproduction.config.needs import hub_sources
from reproduction.suites.task_files import SETS
from statecut.hub import LOCK, HubItem

CONFIG = Path(__file__).parents[1] / "config"
PAPER = str(CONFIG / "paper.yaml")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock and the downloads are looked for below the working directory; flame is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reproduction.config.needs.find_spec", lambda name: True)


def lock(items: Iterable[HubItem]) -> None:
    """Write a lock of these items without a file in any."""
    written: dict[str, dict[str, Any]] = {"models": {}, "datasets": {}}
    for item in items:
        written[f"{item.kind}s"][item.name] = {
            "revision": item.revision,
            "commit": "0" * 40,
            "patterns": item.patterns,
            "files": {},
        }
    LOCK.parent.mkdir()
    LOCK.write_text(json.dumps(written))


def returned(*arguments: str) -> int:
    """What a shell sees."""
    try:
        return main([*arguments])
    except SystemExit as exit:
        return int(str(exit.code))


def test_check_names_what_is_not_in_the_lock(capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = hub_sources(load_config(PAPER))
    lock([first])
    assert returned("check", PAPER) == 1
    summary, *lines = capsys.readouterr().out.splitlines()
    assert summary.startswith(f"{PAPER}: 7 models, 7 methods, ")
    assert [line.split(": ")[0] for line in lines] == [
        f"{item} is not in config/revisions.lock" for item in others
    ]


def test_check_names_the_models_whose_trainer_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"flame": False}
    monkeypatch.setattr("reproduction.config.needs.find_spec", lambda name: there.get(name, True))
    trained = {"delta_net_370M", "delta_net_370M_head", "delta_net_370M_all", "gated_deltanet_370M"}
    assert returned("check", PAPER) == 1
    assert {*capsys.readouterr().out.split("and trains ")[1].strip().split(", ")} == trained
    there["flame"] = True
    returned("check", PAPER)
    assert "flame" not in capsys.readouterr().out


def test_check_refuses_what_is_not_the_papers_protocol(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(Path(PAPER).read_text().replace("window: 10000", "window: 4096"))
    assert main(["check", str(other)]) == 2
    assert "window: 4096, the paper's is 10000" in capsys.readouterr().err


def test_check_names_a_configuration_that_went_on_from_its_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock(hub_sources(load_config(PAPER)))
    changed = tmp_path / "mine.yaml"
    changed.write_text(Path(PAPER).read_text().replace("sample/10BT/", "sample/100BT/"))
    assert returned("check", str(changed)) == 1
    _, line = capsys.readouterr().out.splitlines()
    assert "fineweb-edu: its files sample/100BT/*.parquet are not in" in line


def test_check_says_no_more_where_all_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    lock(hub_sources(load_config(PAPER)))
    assert main(["check", PAPER]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_check_of_a_mistake_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "mine.yaml"
    wrong.write_text((CONFIG / "demo.yaml").read_text() + "\nrnu: x\n")
    assert main(["check", str(wrong)]) == 2
    assert "rnu: unknown key; did you mean 'run'?" in capsys.readouterr().err


def test_download_fetches_what_the_configuration_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched: list[HubItem] = []

    def fetch(items: list[HubItem], *_: Any, **__: Any) -> dict[tuple[str, str], str]:
        fetched.extend(items)
        return {(item.kind, item.name): f"{item}: offline" for item in items}

    monkeypatch.setattr("reproduction.download.fetch", fetch)
    assert main(["download", PAPER]) == 2
    assert tuple(fetched) == hub_sources(load_config(PAPER))
    said = capsys.readouterr()
    items = [line.split("  ")[0] for line in said.out.splitlines()[1:]]
    assert {"tokenizer llama", "model delta_net_1.3B", "corpus fineweb_edu"} < set(items)
    assert "task piqa" in items
    assert len(items) == len(set(items))  # columns of one task share a line
    assert said.out.count("not downloaded") == len(items)
    assert "dataset baber/piqa: offline" in said.err


def test_download_for_a_run_without_the_hub_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    models.symlink_to(CONFIG.parent / "models")
    demo = str(CONFIG / "demo.yaml")
    assert main(["download", demo]) == 0
    assert capsys.readouterr().out.startswith(f"{demo}: needs nothing from the hub\n")
    assert list(tmp_path.iterdir()) == [models]


def test_check_names_local_files_that_are_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lab = str(CONFIG / "lab.yaml")
    assert returned("check", lab) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    files = sorted(["data/corpus/*.jsonl.xz", "data/eval/lambada_openai_test.jsonl",
                    "data/eval/wikitext2_test.raw", "data/tokenizer/mistral-32k.model",
                    *(f"data/eval/{task}.jsonl" for task in SETS)])  # fmt: skip
    assert lines == [f"{file} is not there" for file in files]
    for file in files:
        path = tmp_path / file.replace("*", "english")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert main(["check", lab]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    absolute = tmp_path / "absolute.yaml"
    for pattern, missing in (("*.jsonl.xz", 0), ("*.txt", 1)):
        there = f"{tmp_path}/data/corpus/{pattern}"
        absolute.write_text(Path(lab).read_text().replace("data/corpus/*.jsonl.xz", there))
        assert returned("check", str(absolute)) == missing
        assert capsys.readouterr().out.splitlines()[1:] == [f"{there} is not there"] * missing
