"""`reproduction check` and `download` ask the configuration what it needs from the hub."""

import json
from pathlib import Path

import pytest

from reproduction.cli import main
from reproduction.config import load_config
from reproduction.config.needs import hub_sources
from reproduction.suites.task_files import SETS
from statecut.hub import LOCK

CONFIG = Path(__file__).parents[1] / "config"
PAPER = str(CONFIG / "paper.yaml")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """The lock and the downloads are looked for below the working directory; flame is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reproduction.config.needs.find_spec", lambda name: True)


def lock(items):
    """Write a lock of these items without a file in any."""
    written = {"models": {}, "datasets": {}}
    for item in items:
        about = {"revision": item.revision, "commit": "0" * 40, "patterns": item.patterns}
        written[f"{item.kind}s"][item.name] = {**about, "files": {}}
    LOCK.parent.mkdir()
    LOCK.write_text(json.dumps(written))


@pytest.fixture
def check(capsys):
    """What a shell sees of `check`: the exit code, and lines after the summary."""

    def check(config):
        try:
            code = main(["check", str(config)])
        except SystemExit as exit:
            code = exit.code
        return code, capsys.readouterr().out.splitlines()[1:]

    return check


def test_check_names_what_is_not_in_the_lock(check):
    first, *others = hub_sources(load_config(PAPER))
    lock([first])
    code, lines = check(PAPER)
    assert code == 1
    missing = [f"{item} was not downloaded here" for item in others]
    assert [line.split(": ")[0] for line in lines] == missing


def test_check_names_a_configuration_that_went_on_from_its_lock(tmp_path, check):
    lock(hub_sources(load_config(PAPER)))
    assert check(PAPER) == (0, [])
    changed = tmp_path / "mine.yaml"
    changed.write_text(Path(PAPER).read_text().replace("sample/10BT/", "sample/100BT/"))
    code, (line,) = check(changed)
    assert code == 1
    assert "fineweb-edu: its files sample/100BT/*.parquet are not in" in line


def test_check_of_a_file_that_says_rehearsal_is_of_the_rehearsal(tmp_path, check):
    mine = tmp_path / "mine.yaml"
    mine.write_text(Path(PAPER).read_text() + "rehearsal: true\n")
    assert check(mine) == (0, [])  # what is not downloaded is made up


def test_check_names_the_models_whose_trainer_is_not_there(check, monkeypatch):
    lock(hub_sources(load_config(PAPER)))
    monkeypatch.setattr("reproduction.config.needs.find_spec", lambda name: name != "flame")
    code, (line,) = check(PAPER)
    assert code == 1
    trained = {"delta_net_370M", "delta_net_370M_head", "delta_net_370M_all", "gated_deltanet_370M"}
    assert {*line.split("and trains ")[1].split(", ")} == trained


def test_download_fetches_what_the_configuration_needs(monkeypatch, capsys):
    fetched = []

    def fetch(items, *_, **__):
        fetched.extend(items)
        return {(item.kind, item.name): f"{item}: offline" for item in items}

    monkeypatch.setattr("reproduction.download.fetch", fetch)
    assert main(["download", PAPER]) == 2
    assert tuple(fetched) == hub_sources(load_config(PAPER))
    said = capsys.readouterr()
    items = [line.split("  ")[0] for line in said.out.splitlines()[1:]]
    assert {"tokenizer llama", "model delta_net_1.3B", "corpus fineweb_edu", "task piqa"} < {*items}
    assert len(items) == len(set(items))  # columns of one task share a line
    assert said.out.count("not downloaded") == len(items)
    assert "dataset baber/piqa: offline" in said.err


def test_download_for_a_run_without_the_hub_leaves_nothing_behind(tmp_path):
    models = tmp_path / "models"
    models.symlink_to(CONFIG.parent / "models")
    assert main(["download", str(CONFIG / "demo.yaml")]) == 0
    assert list(tmp_path.iterdir()) == [models]


def test_check_names_local_files_that_are_not_there(check, tmp_path):
    lab = CONFIG / "lab.yaml"
    tasks = {*SETS, "lambada_openai_test"}
    files = sorted(["data/corpus/*.jsonl.xz", "data/eval/wikitext2_test.raw",
                    "data/tokenizer/mistral-32k.model",
                    *(f"data/eval/{task}.jsonl" for task in tasks)])  # fmt: skip
    assert check(lab) == (1, [f"{file} is not there" for file in files])
    for file in files:
        path = tmp_path / file.replace("*", "english")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert check(lab) == (0, [])
