"""Speed on one GPU: preflight, both throughput tables, decoding, the cost of odd widths.

    python benchmarks/speed.py --out FOLDER [--only preflight,mixer,model,...] [--deadline SECONDS]
    python benchmarks/speed_tables.py FOLDER/speed.json         the tables again, beside the paper's

First the kernels are tuned, many processes side by side, since that is compiling on the CPU: the
preflight's shapes, then every distinct shape once, with one layer. Then every cell is timed in a
process of its own with nothing else running; a few are started and import together. What is found
goes to FOLDER/speed.json after every cell, so nothing is lost if time runs out, and a later call
with the same FOLDER goes on from there. Set TRITON_CACHE_DIR to keep the tuning. What was found on
one H200 is in benchmarks/h200/speed.json.

Tiles are chosen once per width for all numbers of heads, with short trials (both are written into
each cell); `--own-tuning` does it fla's way.
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

from arguments import existing
from speed_tables import tables

from keycut.artefact import read_json, write_json
from keycut.benchmarking import Measured, decoding, measure, preflight
from keycut.benchmarking.process import Worker
from keycut.benchmarking.record import from_json
from keycut.benchmarking.tuning import Tuning
from keycut.config import (
    Config,
    DecodingBenchmark,
    Measurement,
    MixerBenchmark,
    Shape,
    load_config,
    shape_of,
)

ROOT = Path(__file__).parent.parent
PARTS = ("preflight", "mixer", "model", "decoding", "sweep", "twice")
OF_PART = {
    "mixer": ("mixer", "gated_mixer"),
    "model": ("model", "model_training"),
    "decoding": ("decoding",),
    "sweep": ("widths",),
}
# The same cell twice, each time in a process of its own: how far apart?
TWICE = (("mixer", "forward"), ("mixer", "training"), ("model", "forward"))
SPARE = 4  # processes that import together
# Sooner or later a kernel hangs: no cell may take the rest of the time with it.
CELL_LIMIT_S, WARM_LIMIT_S = 180.0, 480.0

Alike = dict[str, Measurement]  # the cells of one shape, by what they do

started = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - started:6.1f} s]", *words, flush=True)


def seconds_left(options: argparse.Namespace) -> float:
    return options.deadline - (time.monotonic() - started)


# --- which cells ---


def planned(config: Config, parts: Iterable[str], subjects: str) -> list[Measurement]:
    """Cells in the order of their worth: if time runs out, the last are left out."""
    names = [name for part in parts for name in OF_PART.get(part, ()) if name in config.benchmarks]
    cells = list(config.measurements(*names)) if names else []
    chosen = [
        cell
        for cell in cells
        if subjects == "all" or cell.benchmark not in ("decoding", "widths")
        or cell.kernel == "delta_net"
    ]  # fmt: skip
    seen: set[tuple[str, str, int]] = set()
    unique = []
    for cell in chosen:  # the sweep has cells of the mixer table in it
        is_mixer = config.benchmarks[cell.benchmark].kind == "mixer"
        key = (cell.subject, cell.does, cell.width)
        if not (is_mixer and key in seen):
            unique.append(cell)
        if is_mixer:
            seen.add(key)
    return unique


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


def batches_to_warm(
    config: Config, cells: list[Measurement], checked: set[Shape]
) -> tuple[list[Alike], list[Alike], list[Alike]]:
    """Every distinct shape once, in three batches, so that no tile is searched for twice.

    First one shape for each kernel, width and value width that the preflight does not compile;
    then one for each that it does; then the others, which find their tiles chosen.
    """
    shapes: dict[tuple[str, int, bool], Alike] = {}
    # Mixers before models: 16 heads are the shape of most.
    for cell in sorted(cells, key=lambda c: "mixer" not in c.subject):
        key = (cell.subject, cell.width, cell.does == "decoding")
        shapes.setdefault(key, {})[cell.does] = cell
    first: list[Alike] = []
    second: list[Alike] = []
    rest: list[Alike] = []
    known = set()
    for shape in shapes.values():
        cell = next(iter(shape.values()))
        whole = shape_of_cell(config, cell)
        rule = (cell.kernel, cell.width, whole.value_width)
        if cell.does == "decoding" or rule in known:
            rest.append(shape)
            continue
        known.add(rule)
        (second if whole in checked else first).append(shape)
    return first, second, rest


def warm(
    config: Config,
    shapes: list[Alike],
    jobs: int,
    tuning: Tuning,
    options: argparse.Namespace,
) -> None:
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
            work = decoding.tune, benchmark, small.models[cell.subject], cell, tuning
            outcome = Worker().run(*work, limit_s=limit_s)
            return f"warm {name(cell)}: {outcome.seconds:.0f} s {outcome.reason}"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "cell.json"
            found = measure(small, cell, out, limit_s=limit_s, tuning=tuning, apart=True)
        reasons = {f.reason for f in found.results.values() if f.reason}
        return f"warm {name(cell)}: {found.seconds:.0f} s {'; '.join(sorted(reasons))}"

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(one, shape) for shape in shapes]):
            say(future.result())


# --- timing ---


def name(cell: Measurement) -> str:
    return f"{cell.benchmark} {cell.subject} d_k {cell.width} {cell.does}"


class Results:
    """All that was found, written after every addition."""

    def __init__(self, path: Path):
        self.path = path
        self.verdicts: dict[Shape, preflight.Verdict] = {}
        self.cells: dict[str, Measured] = {}
        self.left_out: list[str] = []
        if path.is_file():
            record = read_json(path)
            for one in record["preflight"]:
                verdict = preflight.from_json(one)
                self.verdicts[verdict.shape] = verdict
            self.cells = {key: from_json(one) for key, one in record["cells"].items()}

    def done(self, key: str) -> bool:
        """Whether a cell has its values, all that a limit of time did not cut off."""
        results = self.cells[key].results.values() if key in self.cells else ()
        cut_off = any("no result within" in one.reason for one in results)
        return not cut_off and any(one.value is not None for one in results)

    def write(self) -> None:
        write_json(
            self.path,
            {
                "preflight": [asdict(verdict) for verdict in self.verdicts.values()],
                "cells": {key: asdict(cell) for key, cell in self.cells.items()},
                "left_out": self.left_out,
            },
        )


def together(todo: list[tuple[str, Measurement]]) -> int:
    """How many processes are started for the next cells. The largest batch of decoding must have
    the GPU's memory to itself."""
    small = takewhile(lambda one: one[1].does != "decoding", todo)
    return max(1, sum(1 for _ in islice(small, SPARE)))


def time_cells(
    config: Config,
    wanted: list[tuple[str, Measurement]],
    results: Results,
    options: argparse.Namespace,
    tuning: Tuning,
) -> None:
    spare: deque[Worker] = deque()
    todo = [(key, cell) for key, cell in wanted if not results.done(key)]
    try:
        for at, (key, cell) in enumerate(todo):
            left = seconds_left(options)
            if left < 15:
                results.left_out = [key for key, _ in todo[at:]]
                say(f"out of time: {len(results.left_out)} cells left out")
                break
            if not spare:
                spare.extend(Worker() for _ in range(together(todo[at:])))
            for worker in spare:
                worker.wait()
            worker = spare.popleft()
            found = measure(
                config,
                cell,
                options.out / "cells" / f"{key.replace(' ', '-')}.json",
                limit_s=min(CELL_LIMIT_S, left),
                apart=True,
                tuning=tuning,
                seconds=options.seconds,
                worker=worker,
            )
            results.cells[key] = found
            results.write()
            say(key, line(found))
    finally:
        for worker in spare:
            worker.close()
        results.write()


def line(found: Measured) -> str:
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


def check(config: Config, results: Results, jobs: int, options: argparse.Namespace) -> None:
    """The preflight of every shape that is trained; those known from before are not repeated."""
    wanted = [one for one in config.trained_shapes() if one not in results.verdicts]

    def tell(verdict: preflight.Verdict) -> None:
        say(preflight.row(verdict))
        if "no result within" not in verdict.reason:  # the next call may have more time
            results.verdicts[verdict.shape] = verdict
            results.write()

    if wanted:
        limit_s = max(60.0, min(WARM_LIMIT_S, seconds_left(options)))
        preflight.check_shapes(
            wanted, config.preflight, limit_s=limit_s, jobs=jobs, apart=True, tell=tell
        )


def run(options: argparse.Namespace) -> Results:
    config = shortened(load_config(options.configfile), options.tokens)
    parts = options.only.split(",")
    results = Results(options.out / "speed.json")
    tuning = Tuning() if options.own_tuning else Tuning(share_heads=True, quick=True)
    cells = planned(config, parts, options.subjects)
    wanted = [(name(cell), cell) for cell in cells]
    if "twice" in parts:
        wanted += [(f"again {name(cell)}", cell) for cell in _twice(config)]
    todo = [cell for key, cell in wanted if not results.done(key)]
    say(f"{len(wanted)} cells, {len(todo)} of them to do")

    checked = set(config.trained_shapes()) if "preflight" in parts else set()
    first, *later = batches_to_warm(config, todo, checked)
    # Both at once: the preflight leaves cores idle towards its end.
    with ThreadPoolExecutor(2) as pool:
        aside = max(1, options.jobs // 3) if checked else options.jobs
        works = [pool.submit(warm, config, first, aside, tuning, options)]
        if checked:
            works.append(pool.submit(check, config, results, max(1, options.jobs - aside), options))
        for work in works:
            work.result()
    for batch in later:
        warm(config, batch, options.jobs, tuning, options)
    say("tuned")
    time_cells(config, wanted, results, options, tuning)
    return results


def _twice(config: Config) -> Iterator[Measurement]:
    for benchmark, does in TWICE:
        if benchmark in config.benchmarks:
            yield from [c for c in config.measurements(benchmark) if c.does == does][:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--configfile", type=existing, default=ROOT / "config" / "paper.yaml")
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--subjects", choices=["delta_net", "all"], default="delta_net",
                        help="what decoding and sweep are measured for")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=12, help="processes that tune side by side")
    parser.add_argument("--deadline", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no cell after this")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3.0, help="timed runs of one figure take "
                        "about this long, but never fewer than three runs")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=32, help="generated in one decoding run")
    parser.add_argument("--own-tuning", action="store_true", help="tune each shape fla's way")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results = run(options)
    print(tables(read_json(results.path)))
    if results.left_out:
        print(f"left out: {', '.join(results.left_out)}")
    print(json.dumps({"seconds": round(time.monotonic() - started, 1)}), file=sys.stderr)


if __name__ == "__main__":
    main()
