"""What the library logs reaches stderr once, as it is."""

import logging

import pytest

from statecut import logs
from statecut.cli import main


def test_records_are_plain_lines_on_stderr(capsys):
    logs.start()
    logs.start()
    logging.getLogger("statecut.pruning.prune").info("selecting: %s", "l1")
    logging.warning("of another library")  # configures the root logger where nothing has
    logging.getLogger("statecut.pruning.prune").info("slicing")
    logging.getLogger("other").info("never shown")
    assert capsys.readouterr() == ("", "selecting: l1\nof another library\nslicing\n")


def test_the_command_line_shows_them(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("statecut"), "level", logging.NOTSET)
    logging.getLogger().removeHandler(logs._HANDLER)
    with pytest.raises(SystemExit):
        main(["--version"])
    logging.getLogger("statecut.models").info("compiling")
    assert capsys.readouterr().err == "compiling\n"
