"""What the library logs reaches stderr once, as it is."""

import logging

import pytest

from keycut import logs
from keycut.cli import main


def test_records_are_plain_lines_on_stderr(capsys):
    logs.start()
    logs.start()
    logging.getLogger("keycut.prune").info("selecting: %s", "l1")
    logging.warning("of another library")  # configures the root logger where nothing has
    logging.getLogger("keycut.prune").info("slicing")
    logging.getLogger("other").info("never shown")
    assert capsys.readouterr() == ("", "selecting: l1\nof another library\nslicing\n")


def test_the_command_line_shows_them(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("keycut"), "level", logging.NOTSET)
    logging.getLogger().removeHandler(logs._HANDLER)
    with pytest.raises(SystemExit):
        main(["--version"])
    logging.getLogger("keycut.models").info("compiling")
    assert capsys.readouterr().err == "compiling\n"
