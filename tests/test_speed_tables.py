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
    odd = copy.deepcopy(again)
    odd["cell"] |= {"benchmark": "widths", "width": 48}
    cells |= {f"again {key}": again, "widths delta_net_mixer d_k 48 forward": odd}
    write_json(tmp_path / "speed.json", record)
    said = printed(tmp_path / "speed.json")
    assert f"| {key} | 14,724,703 | 22,087,054 | 1.50 |" in said
    swept = said.split("### Odd widths: one layer, forward\n")[1].split("###")[0]
    assert [line.split(" | ")[1] for line in swept.splitlines()[3:] if line] == [
        "128", "64", "48", "32"
    ]  # fmt: skip


def test_odd_widths_are_drawn(tmp_path: Path) -> None:
    record = read_json(FOUND)
    for width in (112, 96, 89, 80, 76, 48, 16):
        for does in ("forward", "training"):
            one = copy.deepcopy(record["cells"][f"mixer delta_net_mixer d_k 64 {does}"])
            one["cell"] |= {"benchmark": "widths", "width": width}
            record["cells"][f"widths delta_net_mixer d_k {width} {does}"] = one
    write_json(tmp_path / "speed.json", record)
    printed(tmp_path / "speed.json", "--plot", tmp_path / "widths.svg")
    assert "DeltaNet" in (tmp_path / "widths.svg").read_text()
