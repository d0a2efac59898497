"""The tables of docs/speed.md are those of the file they name."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

from keycut.artefact import read_json, write_json

ROOT = Path(__file__).parent.parent
SCRIPT, FOUND = ROOT / "benchmarks" / "speed_tables.py", ROOT / "benchmarks" / "h200" / "speed.json"


def printed(file: Path, *options: str | Path) -> str:
    done = subprocess.run([sys.executable, SCRIPT, file, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_document_holds_what_the_command_prints() -> None:
    assert (ROOT / "docs" / "speed.md").read_text().endswith("\n\n" + printed(FOUND))


def test_a_cell_measured_again_and_odd_widths_have_tables_of_their_own(tmp_path: Path) -> None:
    record = read_json(FOUND)
    cells = record["cells"]
    key = "mixer delta_net_mixer d_k 64 forward"
    again = copy.deepcopy(cells[key])
    again["results"]["tokens_per_s"]["value"] *= 1.5
    cells[f"again {key}"] = again
    del cells["widths delta_net_mixer d_k 48 forward"]
    write_json(tmp_path / "speed.json", record)
    said = printed(tmp_path / "speed.json")
    assert f"| {key} | 14,724,703 | 22,087,054 | 1.50 |" in said
    swept = said.split("### Odd widths: one layer, forward\n")[1].split("###")[0]
    assert [line.split(" | ")[1] for line in swept.splitlines()[3:] if line] == [
        "128", "112", "96", "89", "80", "76", "64", "32", "16"
    ]  # fmt: skip


def test_odd_widths_are_drawn_where_none_is_missing(tmp_path: Path) -> None:
    printed(FOUND, "--plot", tmp_path / "widths.svg")
    drawn = (tmp_path / "widths.svg").read_text()
    assert "DeltaNet" in drawn
    assert "background:#fff" in drawn
    record = read_json(FOUND)
    del record["cells"]["widths delta_net_mixer d_k 48 forward"]
    write_json(tmp_path / "speed.json", record)
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "speed.json", "--plot", tmp_path / "other.svg"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no mixer was measured at all widths" in done.stderr
