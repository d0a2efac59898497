"""What the benchmarks share that write rows of JSON and go on where they stopped."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LABELS = {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet", "qwen3_5_text": "Hybrid"}
"""Of models in the documents, by their model_type."""


def existing(text: str) -> Path:
    """A file or folder that is read: looked for before any work starts."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return Path(text)


def new_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path, metavar="ROWS")
    parser.add_argument("--table", action="store_true", help="print the tables of --rows")
    parser.add_argument("--rows", type=existing, nargs="+", default=[], metavar="FILE")
    return parser


def device_of(parser: argparse.ArgumentParser, options: argparse.Namespace, *needed: str) -> str:
    if missing := [name for name in (*needed, "out") if not getattr(options, name)]:
        parser.error(f"give --{' and --'.join(missing)}")
    import torch

    if options.gpu and not torch.cuda.is_available():
        parser.error(f"--gpu: torch {torch.__version__} finds no GPU here")
    return "cuda" if options.gpu else "cpu"


def read_rows(*files: Path) -> list[Row]:
    lines = (line for file in files if file.exists() for line in file.read_text().splitlines())
    return [json.loads(line) for line in lines]


def append_rows(file: Path, rows: Iterable[Row], line: Callable[[Row], str]) -> None:
    """Each as soon as it is known, and a line of it for people."""
    start = time.monotonic()
    with file.open("a") as out:
        for row in rows:
            print(json.dumps(row), file=out, flush=True)
            print(f"{time.monotonic() - start:.0f} s  {line(row)}", flush=True)


def save_for_page(figure: Any, out: Path) -> None:
    """In a grey that reads on white pages and on dark ones: a page cannot colour the picture."""
    from reproduction.reporting.style import save

    save(figure, [out])
    if out.suffix == ".svg":
        out.write_text(out.read_text().replace("currentColor", "#768390"))


def markdown(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """A table; `columns` are parted by bars."""
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
