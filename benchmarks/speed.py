"""Speed on one GPU: preflight, both throughput tables, decoding, the cost of odd widths.

    python benchmarks/speed.py --out FOLDER [--only preflight,mixer,model,...] [--deadline SECONDS]
    python benchmarks/speed.py --out FOLDER --list              which cells, and which are to do
    python benchmarks/speed_tables.py FOLDER/speed.json         the tables again, beside the paper's

The cells are those of config/paper.yaml, and `extended` adds some: two odd widths of the largest
Gated DeltaNet, a layer with gate at d_k 16, layers at 4,096 tokens, and config/lab.yaml's models.

First the kernels are tuned, many processes side by side, since that is compiling on the CPU: the
preflight's shapes, then every distinct shape once, with one layer. `--tune` does no more than that,
for all cells. Then every cell is timed in a process of its own with nothing else running; a few are
started and import together. What is found goes to FOLDER/speed.json after every cell, so nothing is
lost if time runs out, and a later call with the same FOLDER goes on from there: with what is
missing, took too long or crashed. Set TRITON_CACHE_DIR to keep the tuning. What was found on one
H200 is in benchmarks/h200/speed.json; a copy of it in FOLDER goes on from that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from arguments import existing
from speed_tables import TRAINING, tables

from reproduction.benchmarking import decoding
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
from statecut.process import Worker

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "config" / "lab.yaml"
# In the order of their worth: if time runs out, the last are left out.
OF_PART = {
    "model": ("model", *TRAINING),
    "mixer": ("mixer", "gated_mixer"),
    "sweep": ("widths",),
    "long": ("long_mixer",),
    "small": ("small_model",),
    "decoding": ("decoding",),
}
PARTS = ("preflight", *OF_PART, "twice")
# What a process that waits for a cell has imported.
HEAVY = ("reproduction.benchmarking.decoding", "fla.layers", "fla.models")
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
LONG = 4096  # tokens, as in the authors' script
SPARE = 12  # processes that import together
# Sooner or later a kernel hangs: no cell may take the rest of the time with it.
CELL_LIMIT_S, WARM_LIMIT_S = 180.0, 480.0
LEAST_S = {"decoding": 60.0}  # no cell starts with less; others 15
UNFINISHED = ("no result within", "illegal memory access")  # reasons to measure again

Alike = dict[str, Measurement]  # the cells of one shape, by what they do

started = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - started:6.1f} s]", *words, flush=True)


def seconds_left(options: argparse.Namespace) -> float:
    return options.deadline - (time.monotonic() - started)


# --- which cells ---


def extended(config: Config, small: Config) -> Config:
    """With the cells that docs/speed.md shows beside those of the configuration."""
    benchmarks = dict(config.benchmarks)
    for name, benchmark in config.benchmarks.items():
        changed: dict[str, Any] = {}
        if isinstance(benchmark, ModelBenchmark) and ODD_MODEL in benchmark.models:
            changed["ratios"] = (*ODD_RATIOS, *benchmark.ratios)
        if name == "gated_mixer":
            changed["widths"] = (*benchmark.widths, NARROW)
        benchmarks[name] = benchmark.model_copy(update=changed)
    if "mixer" in benchmarks:
        longer = {"length": LONG, "passes": ("forward",)}
        benchmarks["long_mixer"] = benchmarks["mixer"].model_copy(update=longer)
    benchmarks["small_model"] = small.benchmarks["model"].model_copy(
        update={"passes": ("forward",)}
    )
    models = {**small.models, **config.models}
    return config.model_copy(update={"models": models, "benchmarks": benchmarks})


def planned(config: Config, parts: Iterable[str], gated_sweep: bool) -> list[Measurement]:
    names = [name for part in OF_PART if part in parts for name in OF_PART[part]]
    names = [name for name in names if name in config.benchmarks]
    mixer = config.benchmarks.get("mixer")
    shared = mixer.widths if isinstance(mixer, MixerBenchmark) else ()

    def belongs(cell: Measurement) -> bool:
        if cell.benchmark == "widths":  # those of the mixer table are measured there
            shown = gated_sweep or cell.kernel == "delta_net" or cell.width == NARROW
            return shown and cell.width not in shared
        return cell.ratio not in ODD_RATIOS or cell.subject == ODD_MODEL

    return [cell for cell in config.measurements(*names) if belongs(cell)] if names else []


def shortened(config: Config, tokens: int) -> Config:
    """Decoding with fewer tokens and batches, and a prompt that needs no chunked kernel."""
    benchmarks = dict(config.benchmarks)
    for name, benchmark in benchmarks.items():
        if isinstance(benchmark, DecodingBenchmark):
            some = benchmark.batches
            short = {
                "tokens": min(tokens, benchmark.tokens),
                "prompt": min(64, benchmark.prompt),
                "batches": tuple(sorted({some[0], some[len(some) // 2], some[-1]})),
            }
            benchmarks[name] = benchmark.model_copy(update=short)
    return config.model_copy(update={"benchmarks": benchmarks})


# --- tuning ---


def one_layer(config: Config) -> Config:
    """The same shapes with one layer and one run: all that tuning needs."""
    models = {
        name: model.model_copy(update={"num_hidden_layers": 1})
        for name, model in config.models.items()
    }
    once = {"warmup": 1, "repeats": 1}
    benchmarks = {
        name: benchmark.model_copy(
            update=once | ({"tokens": 2} if isinstance(benchmark, DecodingBenchmark) else {})
        )
        for name, benchmark in config.benchmarks.items()
    }
    return config.model_copy(update={"models": models, "benchmarks": benchmarks})


def shape_of_cell(config: Config, cell: Measurement) -> Shape:
    benchmark = config.benchmarks[cell.benchmark]
    if isinstance(benchmark, MixerBenchmark):
        heads, values = benchmark.num_heads, benchmark.head_v_dim
        return Shape(cell.kernel, heads, cell.width, heads, values)
    return replace(shape_of(config.models[cell.subject]), width=cell.width)


def length_of_cell(config: Config, cell: Measurement) -> int:
    benchmark = config.benchmarks[cell.benchmark]
    return 0 if isinstance(benchmark, DecodingBenchmark) else benchmark.length


def shapes_to_tune(config: Config, cells: list[Measurement]) -> list[Alike]:
    """Every distinct shape once; first one of each rule and width, for which others would wait."""
    shapes: dict[tuple[str, int, int], Alike] = {}
    for cell in cells:
        key = (cell.subject, cell.width, length_of_cell(config, cell))
        shapes.setdefault(key, {})[cell.mode] = cell
    first: dict[tuple[object, ...], Alike] = {}
    rest: list[Alike] = []
    for shape in shapes.values():
        cell = next(iter(shape.values()))
        rule = (cell.kernel, cell.width, shape_of_cell(config, cell).value_width)
        if first.setdefault(rule, shape) is not shape:
            rest.append(shape)
    return [*first.values(), *rest]


def warm(config: Config, shapes: list[Alike], options: argparse.Namespace) -> None:
    """Run each shape once. Training covers the forward pass, where there is a choice."""
    small = one_layer(config)
    record = options.out / "warmed.json"  # beside the kernels' own cache, or of no use
    warmed = set(read_json(record)) if record.is_file() else set()

    def one(shape: Alike) -> str:
        cell = shape.get("training") or next(iter(shape.values()))
        if name(cell) in warmed:
            return f"warm {name(cell)}: done before"
        if seconds_left(options) < 45:
            return f"warm {name(cell)}: left out, no time"
        line = run_once(cell)
        if "no result within" not in line:
            warmed.add(name(cell))
            write_json(record, sorted(warmed))
        return line

    def run_once(cell: Measurement) -> str:
        benchmark = small.benchmarks[cell.benchmark]
        limit_s = min(WARM_LIMIT_S, seconds_left(options))
        if isinstance(benchmark, DecodingBenchmark):
            work = decoding.tune, benchmark, small.models[cell.subject], cell
            outcome = Worker().run(*work, limit_s=limit_s)
            return f"warm {name(cell)}: {outcome.seconds:.0f} s {outcome.reason}"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "cell.json"
            found = measure(small, cell, out, limit_s=limit_s)
        reasons = {f.reason for f in found.results.values() if f.reason}
        return f"warm {name(cell)}: {found.seconds:.0f} s {'; '.join(sorted(reasons))}"

    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(one, shape) for shape in shapes]):
            say(future.result())


# --- timing ---


def name(cell: Measurement) -> str:
    return f"{cell.benchmark} {cell.subject} d_k {cell.width} {cell.mode}"


class Results:
    """All that was found, written after every addition."""

    def __init__(self, path: Path):
        self.path = path
        self.verdicts: dict[Shape, preflight.ShapeVerdict] = {}
        self.cells: dict[str, CellRecord] = {}
        self.left_out: list[str] = []
        if path.is_file():
            record = read_json(path)
            for one in record["preflight"]:
                verdict = verdicts.from_json(one)
                self.verdicts[verdict.shape] = verdict
            self.cells = {key: from_json(one) for key, one in record["cells"].items()}

    def done(self, key: str) -> bool:
        """Whether a cell has its values, all that neither a limit of time nor a crash cut off."""
        results = self.cells[key].results.values() if key in self.cells else ()
        cut_off = any(_unfinished(one.reason) for one in results)
        return not cut_off and any(one.value is not None for one in results)

    def checked(self, shape: Shape) -> bool:
        return shape in self.verdicts and not _unfinished(self.verdicts[shape].reason)

    def forget(self, texts: Iterable[str]) -> None:
        """Cells whose name has one of these in it: of other code, or of a disturbed machine."""
        known = [key for key in self.cells if any(text in key for text in texts)]
        for key in known:
            del self.cells[key]
        if known:
            say(f"forgotten: {', '.join(known)}")

    def write(self) -> None:
        write_json(
            self.path,
            {
                "preflight": [asdict(verdict) for verdict in self.verdicts.values()],
                "cells": {key: asdict(cell) for key, cell in self.cells.items()},
                "left_out": self.left_out,
            },
        )


def _unfinished(reason: str) -> bool:
    return any(words in reason for words in UNFINISHED)


def together(todo: list[tuple[str, Measurement]]) -> int:
    """How many processes are started for the next cells. The largest batch of decoding must have
    the GPU's memory to itself: one process that waits takes less than that search resolves."""
    small = takewhile(lambda one: one[1].mode != "decoding", todo)
    return max(min(2, len(todo)), sum(1 for _ in islice(small, SPARE)))


def time_cells(
    config: Config,
    wanted: list[tuple[str, Measurement]],
    results: Results,
    options: argparse.Namespace,
) -> None:
    spare: deque[Worker] = deque()
    todo = [(key, cell) for key, cell in wanted if not results.done(key)]
    try:
        for at, (key, cell) in enumerate(todo):
            left = seconds_left(options)
            if left < LEAST_S.get(cell.mode, 15.0):
                results.left_out.append(key)
                continue
            if not spare:
                spare.extend(Worker(*HEAVY) for _ in range(together(todo[at:])))
            for worker in spare:
                worker.wait()
            worker = spare.popleft()
            found = measure(
                config,
                cell,
                options.out / "cells" / f"{key.replace(' ', '-')}.json",
                limit_s=min(CELL_LIMIT_S, left),
                seconds=options.seconds,
                worker=worker,
            )
            results.cells[key] = found
            results.write()
            say(f"{at + 1}/{len(todo)}", key, line(found))
    finally:
        for worker in spare:
            worker.close()
        results.write()


def line(found: CellRecord) -> str:
    in_all = f" | {found.seconds:.1f} s in all"
    reasons = [f.reason for f in found.results.values() if f.reason]
    if len(reasons) == len(found.results) and len(set(reasons)) == 1:
        return reasons[0] + in_all
    said = []
    for metric, f in found.results.items():
        if f.value is None:
            said.append(f"{metric} {f.reason}")
            continue
        spread = f" ± {f.stderr:,.1g}" if f.stderr else ""
        runs = f" ({f.runs.repeats} runs)" if f.runs else ""
        note = f" [{f.note}]" if f.note else ""
        said.append(f"{metric} {f.value:,.5g}{spread}{runs}{note}")
    return ", ".join(said) + in_all


# --- all of it ---


def shapes_to_check(config: Config) -> tuple[Shape, ...]:
    """All that are trained, then what is as narrow among those whose training is timed: compilers
    had the backward pass wrong there."""
    names = [name for name in TRAINING if name in config.benchmarks]
    timed = config.measurements(*names) if names else ()
    narrow = [shape_of_cell(config, cell) for cell in timed if cell.width <= 2 * NARROW]
    return tuple(dict.fromkeys([*config.trained_shapes(), *narrow]))


def check(
    config: Config, wanted: list[Shape], results: Results, options: argparse.Namespace
) -> None:
    """The preflight of some shapes."""
    limit_s = max(60.0, min(WARM_LIMIT_S, seconds_left(options)))
    for verdict in preflight.check_shapes(
        wanted, **config.preflight.model_dump(), limit_s=limit_s, jobs=options.jobs
    ):
        say(preflight.table_row(verdict))
        if "no result within" not in verdict.reason:  # the next call may have more time
            results.verdicts[verdict.shape] = verdict
            results.write()


def run(options: argparse.Namespace) -> Results:
    given = load_config(options.configfile)
    config = shortened(extended(given, load_config(SMALL)), options.tokens)
    parts = options.only.split(",")
    results = Results(options.out / "speed.json")
    results.forget(options.forget)
    cells = planned(config, parts, options.gated_sweep)
    wanted = [(name(cell), cell) for cell in cells]
    if "twice" in parts:
        wanted += [(f"again {name(cell)}", cell) for cell in _twice(config)]
    todo = [cell for key, cell in wanted if not results.done(key)]
    shapes = shapes_to_check(given) if "preflight" in parts else ()
    unchecked = [shape for shape in shapes if not results.checked(shape)]
    say(f"{len(wanted)} cells, {len(todo)} of them to do; {len(unchecked)} shapes to check")
    if options.list:
        for shape in unchecked:
            print("check", shape)
        for key, _ in wanted:
            print("done " if results.done(key) else "to do", key)
        return results

    if options.tune:
        warm(config, shapes_to_tune(config, cells), options)
        return results
    if unchecked:
        check(given, unchecked, results, options)
    warm(config, shapes_to_tune(config, todo), options)
    say("tuned")
    time_cells(config, wanted, results, options)
    return results


def _twice(config: Config) -> Iterator[Measurement]:
    for benchmark, mode in TWICE:
        if benchmark in config.benchmarks:
            yield from [c for c in config.measurements(benchmark) if c.mode == mode][:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--configfile", type=existing, default=ROOT / "config" / "paper.yaml")
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--list", action="store_true", help="say which cells, and measure none")
    parser.add_argument("--tune", action="store_true", help="tune all kernels, and measure nothing")
    parser.add_argument("--forget", nargs="+", default=[], metavar="TEXT",
                        help="measure cells with this in their name again")  # fmt: skip
    parser.add_argument("--gated-sweep", action="store_true",
                        help="odd widths of a layer of Gated DeltaNet too")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=12, help="processes that tune side by side")
    parser.add_argument("--deadline", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no cell after this")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3.0, help="timed runs of one figure take "
                        "about this long, but never fewer than three runs")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=32, help="generated in one decoding run")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results = run(options)
    if options.list or options.tune:
        return
    print(tables(read_json(results.path)))
    if results.left_out:
        print(f"left out: {', '.join(results.left_out)}")
    print(json.dumps({"seconds": round(time.monotonic() - started, 1)}), file=sys.stderr)


if __name__ == "__main__":
    main()
