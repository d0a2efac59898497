"""Speed on one GPU: layers, whole models, decoding, odd widths, and whether every shape trains.

    python benchmarks/speed.py --out FOLDER [--only preflight,mixer,model,...]
    python benchmarks/speed.py --table benchmarks/h200/speed.json        as Markdown

The cells are those of config/paper.yaml, and two odd widths of the largest Gated DeltaNet.

The preflight's shapes are checked side by side; then every cell is tuned and timed in a process of
its own with nothing else running. What is found goes to FOLDER/speed.json after every cell, so
nothing is lost if time runs out, and a later call with the same FOLDER goes on from there: with
what is missing, took too long or crashed. Set TRITON_CACHE_DIR to keep the tuning. A copy of
benchmarks/h200/speed.json in FOLDER goes on from what was found on one H200.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rows import existing, markdown

from reproduction.benchmarking.cell import measure
from reproduction.benchmarking.record import CellRecord, from_json
from reproduction.config import (
    Config,
    DecodingBenchmark,
    Measurement,
    MixerBenchmark,
    ModelBenchmark,
    load_config,
    shape_of,
)
from reproduction.pretraining import verdicts
from statecut import preflight
from statecut.files import read_json, write_json
from statecut.models.shapes import Shape

ROOT = Path(__file__).parent.parent
TRAINING = ("model_training", "model_training_370M")
# In the order of their worth: if time runs out, the last are left out.
OF_PART = {
    "model": ("model", *TRAINING),
    "mixer": ("mixer",),
    "sweep": ("widths",),
    "decoding": ("decoding",),
}
PARTS = ("preflight", *OF_PART, "twice")
# The same cell twice, each time in a process of its own: how far apart?
TWICE = (
    ("mixer", "forward"),
    ("mixer", "training"),
    ("model", "forward"),
    ("model_training", "training"),
    ("decoding", "decoding"),
)
# Ratios of the paper's quality tables that its speed table does not have: d_k 179 and 153.
ODD_RATIOS, ODD_MODEL = (0.3, 0.4), "gated_deltanet_1.3B"
NARROW = 16
AGAIN = "again "
# Sooner or later a kernel hangs: no cell may take the rest of the time with it. Tuning is inside.
LIMIT_S = 480.0
UNFINISHED = ("no result within", "illegal memory access")  # reasons to measure again
DECODING = {"tokens": 32, "prompt": 64, "batches": (1, 16, 256)}  # no chunked kernel

Wanted = list[tuple[str, Measurement]]
started = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - started:6.1f} s]", *words, flush=True)


def name(cell: Measurement) -> str:
    return f"{cell.benchmark} {cell.subject} d_k {cell.width} {cell.mode}"


# --- which cells ---


def extended(config: Config) -> Config:
    """With the odd widths of docs/results/speed.md, and shorter runs of decoding."""
    benchmarks = dict(config.benchmarks)
    for title, benchmark in config.benchmarks.items():
        changes: dict[str, Any] = {}
        if isinstance(benchmark, ModelBenchmark) and ODD_MODEL in benchmark.models:
            changes["ratios"] = (*ODD_RATIOS, *benchmark.ratios)
        if isinstance(benchmark, DecodingBenchmark):
            changes = DECODING
        benchmarks[title] = benchmark.model_copy(update=changes)
    return config.model_copy(update={"benchmarks": benchmarks})


def planned(config: Config, parts: Iterable[str]) -> Wanted:
    names = [name for part in OF_PART if part in parts for name in OF_PART[part]]
    mixer = config.benchmarks["mixer"]
    assert isinstance(mixer, MixerBenchmark)

    def belongs(cell: Measurement) -> bool:
        if cell.benchmark == "widths":  # those of the mixer table are measured there
            shown = cell.kernel == "delta_net" or cell.width == NARROW
            return shown and cell.width not in mixer.widths
        return cell.ratio not in ODD_RATIOS or cell.subject == ODD_MODEL

    cells = config.measurements(*names) if names else ()
    wanted = [(name(cell), cell) for cell in cells if belongs(cell)]
    for benchmark, mode in TWICE if "twice" in parts else ():
        first = next(c for c in config.measurements(benchmark) if c.mode == mode)
        wanted.append((AGAIN + name(first), first))
    return wanted


def shapes_to_check(config: Config) -> tuple[Shape, ...]:
    """All that are trained, then what is as narrow among those whose training is timed: compilers
    had the backward pass wrong there."""
    narrow = [
        replace(shape_of(config.models[cell.subject]), width=cell.width)
        for cell in config.measurements(*TRAINING)
        if cell.width <= 2 * NARROW
    ]
    return tuple(dict.fromkeys([*config.trained_shapes(), *narrow]))


# --- measuring ---


class Results:
    """All that was found, written after every addition."""

    def __init__(self, path: Path):
        self.path = path
        self.verdicts: dict[Shape, preflight.ShapeVerdict] = {}
        self.cells: dict[str, CellRecord] = {}
        if path.is_file():
            record = read_json(path)
            checks = map(verdicts.from_json, record["preflight"])
            self.verdicts = {verdict.shape: verdict for verdict in checks}
            self.cells = {key: from_json(one) for key, one in record["cells"].items()}

    def done(self, key: str) -> bool:
        """Whether a cell has its values, all that neither a limit of time nor a crash cut off."""
        results = self.cells[key].results.values() if key in self.cells else ()
        cut_off = any(unfinished(one.reason) for one in results)
        return not cut_off and any(one.value is not None for one in results)

    def checked(self, shape: Shape) -> bool:
        return shape in self.verdicts and not unfinished(self.verdicts[shape].reason)

    def write(self) -> None:
        checks = [asdict(verdict) for verdict in self.verdicts.values()]
        cells = {key: asdict(cell) for key, cell in self.cells.items()}
        write_json(self.path, {"preflight": checks, "cells": cells})


def unfinished(reason: str) -> bool:
    return any(words in reason for words in UNFINISHED)


def time_cells(config: Config, todo: Wanted, results: Results, seconds: float) -> None:
    for at, (key, cell) in enumerate(todo):
        results.cells[key] = measure(
            config, cell, results.path.parent / "cells" / f"{key.replace(' ', '-')}.json",
            limit_s=LIMIT_S, seconds=seconds,
        )  # fmt: skip
        results.write()
        found = results.cells[key].results.items()
        said = (f"{metric} {f.reason or f'{f.value:,.5g}'}" for metric, f in found)
        say(f"{at + 1}/{len(todo)}", key, ", ".join(said))


def run(options: argparse.Namespace) -> None:
    given = load_config(ROOT / "config" / "paper.yaml")
    config, parts = extended(given), options.only.split(",")
    results = Results(options.out / "speed.json")
    wanted = planned(config, parts)
    todo = [(key, cell) for key, cell in wanted if not results.done(key)]
    shapes = shapes_to_check(given) if "preflight" in parts else ()
    unchecked = [shape for shape in shapes if not results.checked(shape)]
    say(f"{len(wanted)} cells, {len(todo)} of them to do; {len(unchecked)} shapes to check")
    settings = given.preflight.model_dump()
    for verdict in preflight.check_shapes(
        unchecked, **settings, limit_s=LIMIT_S, jobs=options.jobs
    ):
        say(preflight.table_row(verdict))
        results.verdicts[verdict.shape] = verdict
        results.write()
    time_cells(config, todo, results, options.seconds)


# --- what the documents show ---

GRAPH = "graph_tokens_per_s"
LABELS = {
    "delta_net_mixer": "DeltaNet",
    "gated_deltanet_mixer": "Gated DeltaNet",
    **{f"delta_net_{size}": f"DeltaNet {size}" for size in ("370M", "1.3B", "2.7B")},
    **{f"gated_deltanet_{size}": f"Gated DeltaNet {size}" for size in ("370M", "1.3B")},
}


class Found:
    """Readings by cell; `faster` and `memory` are against the widest of the same subject."""

    def __init__(self, record: dict[str, Any]):
        cells = {key: from_json(one) for key, one in record["cells"].items()}
        self.cells: dict[tuple[str, str, int], CellRecord] = {}
        self.again = [(cells[key.removeprefix(AGAIN)], one)
                      for key, one in cells.items() if key.startswith(AGAIN)]  # fmt: skip
        for key, one in cells.items():
            if not key.startswith(AGAIN):
                self.cells[one.cell.subject, one.cell.mode, one.cell.width] = one

    def widths(self, subject: str, mode: str) -> list[int]:
        return sorted((w for s, m, w in self.cells if (s, m) == (subject, mode)), reverse=True)

    def value(self, subject: str, mode: str, width: int, metric: str = "tokens_per_s") -> float:
        found = self.cells[subject, mode, width].results[metric]
        if found.value is None:
            raise ValueError(f"{subject} {mode} {width}: {metric} {found.reason}")
        return found.value

    def ratio(self, subject: str, mode: str, width: int, metric: str = "tokens_per_s") -> str:
        widest = self.value(subject, mode, self.widths(subject, mode)[0], metric)
        return f"{self.value(subject, mode, width, metric) / widest:.2f}"


def published(table: str) -> dict[tuple[str, int, str], str]:
    """The paper's ratios, in brackets."""
    with open(ROOT / "config" / "published" / "values.csv", newline="") as file:
        return {
            (row["model"], int(row["head_k_dim"]), row["metric"]): f" ({float(row['value']):.2f})"
            for row in csv.DictReader(file)
            if row["table"] == table
        }


def layers(found: Found) -> str:
    paper, memory = published("mixer_scaling"), "peak_memory_gib"
    return markdown(
        "one layer | d_k | forward, tokens/s | faster (paper) | with backward, faster "
        "| memory of forward (paper)",
        (
            (
                LABELS[subject], width, f"{found.value(subject, 'forward', width):,.0f}",
                found.ratio(subject, "forward", width) + paper.get((subject, width, "speedup"), ""),
                found.ratio(subject, "training", width),
                found.ratio(subject, "forward", width, memory)
                + paper.get((subject, width, "memory_ratio"), ""),
            )
            for subject in ("delta_net_mixer", "gated_deltanet_mixer")
            for width in (128, 64, 32)
        ),
    )  # fmt: skip


def models(found: Found) -> str:
    paper, memory = published("speedup_whole_model"), "peak_memory_gib"
    return markdown(
        "model | d_k | forward, tokens/s | faster (paper) | training step, faster "
        "| memory of training",
        (
            (
                LABELS[subject], width, f"{found.value(subject, 'forward', width):,.0f}",
                found.ratio(subject, "forward", width) + paper.get((subject, width, "speedup"), ""),
                found.ratio(subject, "training", width),
                found.ratio(subject, "training", width, memory),
            )
            for subject in list(LABELS)[2:]
            for width in found.widths(subject, "training")
            if 4 * width >= found.widths(subject, "training")[0]
        ),
    )  # fmt: skip


def decoded(found: Found) -> str:
    """Steps as one CUDA graph. The state is read and written once a token and sequence."""

    def row(subject: str, width: int) -> tuple[object, ...]:
        one, most, state, fits = (
            found.value(subject, "decoding", width, metric)
            for metric in (f"{GRAPH}_1", f"{GRAPH}_256", "state_mib", "largest_batch")
        )
        faster = found.ratio(subject, "decoding", width, f"{GRAPH}_256")
        more = found.ratio(subject, "decoding", width, "largest_batch")
        moved = 2 * state * 2**20 * most / 1e12
        return (LABELS[subject], width, f"{one:,.0f}", f"{most:,.0f} ({faster})", f"{moved:.2f}",
                f"{fits:,.0f} ({more})")  # fmt: skip

    return markdown(
        "model | d_k | tokens/s, one sequence | 256 sequences (faster) | state moved, TB/s "
        "| sequences that fit (more)",
        (row(subject, width) for subject in LABELS for width in found.widths(subject, "decoding")),
    )


def odd_widths(found: Found) -> str:
    subject = "delta_net_mixer"
    return markdown(
        "d_k | forward, tokens/s | faster | with backward, tokens/s | faster",
        (
            (width, *(
                text
                for mode in ("forward", "training")
                for text in (f"{found.value(subject, mode, width):,.0f}",
                             found.ratio(subject, mode, width))
            ))
            for width in found.widths(subject, "forward")
        ),
    )  # fmt: skip


def checked(record: dict[str, Any]) -> str:
    shapes = [verdicts.from_json(one) for one in record["preflight"]]
    train = [one for one in shapes if one.verdict == "trains"]
    rule, layer = (
        max(max(part.values()) for part in parts if part)
        for parts in ([one.errors for one in train], [one.layer for one in train])
    )
    return (
        f"{len(train)} of {len(shapes)} shapes train; largest relative error against the fp32 "
        f"recurrence: {rule:.4f} of the rule, {layer:.4f} of a layer."
    )


def twice(found: Found) -> str:
    def speed(one: CellRecord) -> float:
        metric = f"{GRAPH}_256" if one.cell.mode == "decoding" else "tokens_per_s"
        return one.results[metric].value or math.nan

    def ratio(one: CellRecord, again: CellRecord) -> str:
        return f"{one.cell.subject} {one.cell.mode} {speed(again) / speed(one):.2f}"

    ratios = (ratio(*both) for both in found.again)
    return f"The same cell hours later, against the first time: {', '.join(ratios)}."


def tables(record: dict[str, Any]) -> list[str]:
    found = Found(record)
    parts = [table(found) for table in (layers, models, decoded, odd_widths, twice)]
    return [*parts, checked(record)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=existing, metavar="FILE", help="print what it holds")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for what is found")
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--jobs", type=int, default=12, help="shapes checked side by side")
    parser.add_argument("--seconds", type=float, default=3.0, help="timed runs of one figure take "
                        "about this long, but never fewer than three runs")  # fmt: skip
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(tables(read_json(options.table))))
        return
    if not options.out:
        parser.error("give --out, or --table")
    if unknown := set(options.only.split(",")) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    run(options)


if __name__ == "__main__":
    main()
