"""Which cells docs/speed.md needs, and that its tables are those of the file they name."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from statecut.files import read_json, write_json

ROOT = Path(__file__).parent.parent
SPEED, SCRIPT = ROOT / "benchmarks" / "speed.py", ROOT / "benchmarks" / "speed_tables.py"
FOUND = ROOT / "benchmarks" / "h200" / "speed.json"


def printed(file: Path, *options: str | Path) -> str:
    done = subprocess.run([sys.executable, SCRIPT, file, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def listed(monkeypatch, capsys) -> Callable[..., dict[str, bool]]:
    """The cells that speed.py would measure, and whether each is done."""
    monkeypatch.syspath_prepend(SPEED.parent)
    speed = importlib.import_module("speed")

    def cells(folder: Path, *options: str) -> dict[str, bool]:
        monkeypatch.setattr(sys, "argv", ["", "--out", str(folder), "--list", *options])
        speed.main()
        lines = [
            x for x in capsys.readouterr().out.splitlines() if x.startswith(("done ", "to do"))
        ]
        return {line[6:]: line.startswith("done") for line in lines}

    return cells


# --- which cells ---


def test_every_cell_that_the_document_names_is_measured(tmp_path: Path, listed) -> None:
    cells = listed(tmp_path)
    assert not any(cells.values())
    for width in (256, 179, 153, 128, 64, 32):
        assert f"model gated_deltanet_1.3B d_k {width} forward" in cells
        assert f"model_training gated_deltanet_1.3B d_k {width} training" in cells
    assert not any("d_k 89" in cell or "d_k 179" in cell for cell in cells if "370M" in cell)
    for subject in ("delta_net", "gated_deltanet"):
        assert len([c for c in cells if c.startswith(f"model_training_370M {subject}_370M")]) == 4
        assert len([c for c in cells if f"small_model {subject}_40M" in c]) == 3
        assert len([c for c in cells if c.startswith(f"decoding {subject}_")]) == 6
        for width in (128, 64, 32):
            assert f"long_mixer {subject}_mixer d_k {width} forward" in cells
        assert f"widths {subject}_mixer d_k 16 training" in cells
    assert "gated_mixer gated_deltanet_mixer_gate d_k 16 training" in cells
    assert [cell.rsplit(" ", 1)[1] for cell in cells if cell.startswith("again ")] == [
        "forward", "training", "forward", "training", "decoding"
    ]  # fmt: skip


def test_only_what_is_missing_crashed_or_forgotten_is_measured_again(
    tmp_path: Path, listed
) -> None:
    record = read_json(FOUND)
    missing, crashed = (
        "mixer delta_net_mixer d_k 64 forward",
        "mixer delta_net_mixer d_k 128 forward",
    )
    forgotten = "widths delta_net_mixer d_k 48 forward"
    write_json(tmp_path / "speed.json", record)
    before = listed(tmp_path)
    assert before[missing]
    assert before[crashed]
    assert before[forgotten]
    del record["cells"][missing]
    for result in record["cells"][crashed]["results"].values():
        result |= {"value": None, "reason": "not measured: CUDA error: an illegal memory access"}
    write_json(tmp_path / "speed.json", record)
    after = listed(tmp_path, "--forget", forgotten)
    assert {key for key in before if before[key] != after[key]} == {missing, crashed, forgotten}
    assert listed(tmp_path)[forgotten]  # a list changes nothing


# --- the tables ---


def test_the_document_holds_what_the_command_prints(tmp_path: Path) -> None:
    document = ROOT / "docs" / "speed.md"
    assert document.read_text().endswith("\n\n" + printed(FOUND))
    copied = tmp_path / "speed.md"
    copied.write_text(document.read_text().partition("### ")[0])  # the tables are lost
    printed(FOUND, "--into", copied)
    assert copied.read_text() == document.read_text()


def test_graphs_have_columns_and_the_paper_stands_beside_4096_tokens(tmp_path: Path) -> None:
    record = read_json(FOUND)
    cells = {}
    for key, cell in list(record["cells"].items()):
        made = copy.deepcopy(cell)
        if key == "model delta_net_370M d_k 128 forward":
            made["cell"] |= {"benchmark": "small_model", "subject": "delta_net_40M"}
            made["results"]["tokens_per_s"] |= {"value": 1000.0, "stderr": 12.0}
            made["results"]["graph_tokens_per_s"] = made["results"]["tokens_per_s"] | {
                "value": 4000.0, "stderr": 1.0
            }  # fmt: skip
            made["results"]["peak_memory_gib"]["value"] = 4.0
        elif key == "mixer delta_net_mixer d_k 128 forward":
            made["cell"]["benchmark"] = "long_mixer"
            made["results"]["tokens_per_s"] |= {"value": 2000.0, "stderr": 1.0}
            made["results"]["peak_memory_gib"]["value"] = 6.5
        else:
            continue
        cells[key] = made
    write_json(tmp_path / "speed.json", record | {"cells": cells})
    said = printed(tmp_path / "speed.json")
    assert (
        "| DeltaNet 40M | 128 | 1,000 | 1.2 % | 1.00 x | 4,000 | < 0.1 % | 1.00 x | 4.00 | 1.00 |"
    ) in said
    assert (
        "| DeltaNet | 128 | 2,000 | 0.1 % | 1.00 x | 6.50 | 1.00 | 1.00 x | 6.33 | 1.00 |" in said
    )


def test_a_cell_measured_again_and_odd_widths_have_tables_of_their_own(tmp_path: Path) -> None:
    record = read_json(FOUND)
    cells = record["cells"]
    key = "mixer delta_net_mixer d_k 64 forward"
    again = copy.deepcopy(cells[key])
    again["results"]["tokens_per_s"] |= {"value": 3000.0, "stderr": 3.0}
    cells[key]["results"]["tokens_per_s"] |= {"value": 2000.0, "stderr": 20.0}
    cells[f"again {key}"] = again
    del cells["widths delta_net_mixer d_k 48 forward"]
    write_json(tmp_path / "speed.json", record)
    said = printed(tmp_path / "speed.json")
    assert f"| {key} | 2,000 | 1.0 % | 3,000 | 0.1 % | 1.50 |" in said
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
