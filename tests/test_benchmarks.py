"""The scripts in benchmarks/ say what they lack before any work starts."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["findings.py", "."], "selections: holds no model's selections"),
        (["findings.py", "absent"], "absent: no such file or folder"),
        (["kills.py", "--folder", "."], "--folder .: exists already, give a new folder"),
        (["rank.py", "--gpu"], "--gpu: torch .* finds no GPU here"),
        (["roofline.py"], "torch .* finds no GPU here"),
        (["roofline.py", "--model", "x"], "--model x: paper.yaml has delta_net_370M, "),
    ],
)
def test_what_is_missing_is_said_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / arguments[0]), run_name="__main__")
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_scripts_start(script, monkeypatch, capsys):
    """All names that they import exist."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    namespace = runpy.run_path(str(FOLDER / script))
    if "main" in namespace:
        with pytest.raises(SystemExit) as ended:
            namespace["main"]()
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out
