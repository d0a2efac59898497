"""Refit: what it brings for each method, ratio and draw of text, and what it costs.

    python benchmarks/refit.py --gpu --models M1 M2 --text T --out rows.jsonl
    python benchmarks/refit.py ... --config config/lab.yaml --recover 200 50
    python benchmarks/refit.py --gpu --shapes delta_net_1.3B --text T --out rows.jsonl
    python benchmarks/refit.py --models M --text T --sequences 16 --out rows.jsonl       on a CPU
    python benchmarks/refit.py --table rows.jsonl                              as in docs/refit.md

Models are folders of unpruned ones. Text is a folder of packed tokens (`statecut pack`) with slices
`calibration`, of which each seed draws its sequences for selection and refit, `held_out`, whose
perplexity is computed, and with --recover `recovery`. With --config, the suite `ppl` of that
configuration is evaluated, too. --recover N: sliced and refitted models are recovered for N steps
with its settings. --shapes: models of config/paper.yaml with random weights: seconds and memory.

A row of JSON per model, method, ratio and seed is written as soon as it is known; those that are in
the file already are not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from arguments import existing
from torch import Tensor

from reproduction.benchmarking.passes import random_model
from reproduction.config import Config, load_config
from statecut.arguments import width as width_of
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.evaluation.perplexity import perplexity
from statecut.models.checkpoint import Checkpoint, save
from statecut.pruning.calibration import calibrate_folder, sampled_sequences
from statecut.pruning.methods import METHODS, method_named
from statecut.pruning.refit import refit, write_refitted
from statecut.pruning.select import select
from statecut.pruning.slicing import Keep, slice_model
from statecut.pruning.statistics import ModelStatistics
from statecut.recovery.checkpoints import Output
from statecut.recovery.training import recover

PAPER = Path(__file__).parents[1] / "config" / "paper.yaml"
SUITE = "ppl"
KEY = ("model", "method", "ratio", "seed")


@dataclass
class Bench:
    """What all cells have in common."""

    text: Path
    device: str
    sequences: int
    batch: int
    config: Config | None
    steps: list[int]  # of recoveries
    work: Path
    also: tuple[Path, ...] = ()  # more packed text, to compute perplexities of
    suite: bool = True  # of the configuration: is it evaluated?

    def texts(self) -> dict[str, Tensor]:
        """What perplexities are computed of, (sequences, length), by name."""
        texts = {"held_out": PackedTokens(self.text, slice_name="held_out")}
        texts |= {path.name: PackedTokens(path) for path in self.also}
        return {name: torch.from_numpy(tokens[:]) for name, tokens in texts.items()}

    def measure(self, folder: Path) -> dict[str, float]:
        """Perplexities by the names of texts."""
        model = Checkpoint(folder)
        values = {
            name: perplexity(model, ids, device=self.device) for name, ids in self.texts().items()
        }
        if self.config and self.suite:
            from reproduction.suites.suite import evaluate  # lm-eval, which nothing else here needs

            record = evaluate(
                folder, SUITE, self.config, self.work / "suite.json", cache=self.work / "cache",
                device=self.device,
            )  # fmt: skip
            values |= {column: cell["value"] for column, cell in record["results"].items()}
        return values

    def recovered(self, student: Path, teacher: Path, steps: int) -> dict[str, float]:
        assert self.config is not None
        assert self.config.recovery is not None
        short = {"steps": steps, "warmup": math.ceil(steps / 20)}
        settings = self.config.recovery.model_copy(update=short).settings()
        out = self.work / "recovered"
        output = Output(out, checkpoints=self.work / "running", force=True)
        data = PackedTokens(self.text, slice_name="recovery")
        recover(student, teacher, data, settings, output, device=self.device)
        return self.measure(out)

    def refit(self, student: Checkpoint, teacher: Checkpoint, seed: int) -> dict[str, Any]:
        """Into the folder `refitted`; seconds and memory."""
        data = PackedTokens(self.text, slice_name="calibration")
        ids = sampled_sequences(data, self.sequences, seed)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = self.clock()
        result = refit(student, teacher, ids, device=self.device, batch=self.batch)
        seconds = self.clock() - start
        write_refitted(student, result, self.work / "refitted", force=True)
        return {
            "width": student.shape.width,
            "tokens": result.tokens,
            "seconds": round(seconds, 2),
            "peak_MiB": self.peak(),
            "fits": [
                {
                    "name": fit.name,
                    "ridge": str(fit.ridge),
                    **{key: round(getattr(fit, key), 4) for key in ("damage", "error", "held_out")},
                }
                for fit in result.fits
            ],
        }

    def clock(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        if self.device == "cuda":
            return round(torch.cuda.max_memory_allocated() / 2**20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def cells(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict]:
    """A row for each cell that is not done; seeds are outermost."""
    gradients = any("gradients" in METHODS[method].needs for method in options.methods)
    for seed, folder in itertools.product(options.seeds, options.models):
        teacher = Checkpoint(folder)
        pending = [
            (ratio, method)
            for ratio, method in itertools.product(options.ratios, options.methods)
            if (folder.name, method, ratio, seed) not in done
        ]
        if not pending:
            continue
        unpruned = bench.measure(folder)
        calibration = calibrate_folder(
            folder, PackedTokens(bench.text, slice_name="calibration"), name="calibration",
            sequences=bench.sequences, rows=5000, seed=seed, device=bench.device,
            gradients=gradients,
        )  # fmt: skip
        for ratio, method in pending:
            statistics = ModelStatistics(teacher, calibration)
            width = width_of(teacher.shape.width, ratio)
            (selection,) = select(method, statistics, [width], target="kq", seed=seed)
            sliced, refitted = bench.work / "sliced", bench.work / "refitted"
            slice_model(
                teacher,
                selection.change(),
                sliced,
                dtype=teacher.compute_dtype(bench.device),
                force=True,
            )
            cost = bench.refit(Checkpoint(sliced), teacher, seed)
            values = {
                "unpruned": unpruned,
                "sliced": bench.measure(sliced),
                "refitted": bench.measure(refitted),
            }
            for steps, student in itertools.product(bench.steps, (sliced, refitted)):
                name = f"{student.name}, recovered {steps}"
                values[name] = bench.recovered(student, folder, steps)
            yield {
                **dict(zip(KEY, (folder.name, method, ratio, seed), strict=True)),
                "sequences": bench.sequences,
                **cost,
                "perplexity": values,
            }


def shapes(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict]:
    """Models with random weights, of which each head keeps its first channels."""
    models = load_config(PAPER).models
    for name, ratio in itertools.product(options.shapes, options.ratios):
        if (name, None, ratio, None) in done:
            continue
        spec = models[name]
        width = width_of(spec.head_k_dim, ratio)
        save(random_model(spec, spec.head_k_dim, bench.device), bench.work / "whole", force=True)
        teacher = Checkpoint(bench.work / "whole")
        kept = torch.arange(width).expand(len(teacher.shape.layers), teacher.shape.heads, width)
        slice_model(teacher, Keep(kept), bench.work / "sliced", force=True)
        student = Checkpoint(bench.work / "sliced")
        yield {
            **dict(zip(KEY, (name, None, ratio, None), strict=True)),
            "sequences": bench.sequences,
            **bench.refit(student, teacher, seed=0),
        }


def line(row: dict[str, Any]) -> str:
    """For people: each perplexity, and the share of the damage that is gone."""
    parts = []
    values = row.get("perplexity", {})
    for text, whole in values.get("unpruned", {}).items():
        damaged = values["sliced"][text]
        states = [f"{whole:.2f}, sliced {damaged:.2f}"]
        for state in [state for state in values if state not in ("unpruned", "sliced")]:
            gone = (damaged - values[state][text]) / (damaged - whole)
            states.append(f"{state} {values[state][text]:.2f} ({gone:.0%})")
        parts.append(f"{text} {', '.join(states)}")
    cost = f"{row['seconds']} s, {row['peak_MiB']} MiB"
    return f"{' '.join(str(row[key]) for key in KEY)}: {'; '.join([*parts, cost])}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown, means over seeds: what refit changes of perplexities, without recovery and with it,
    and the share of the damage that is gone."""
    cells: dict[tuple[str, float, str], list[dict[str, dict[str, float]]]] = defaultdict(list)
    for row in rows:
        cells[row["model"], row["ratio"], row["method"]].append(row["perplexity"])
    first = rows[0]["perplexity"]
    texts = list(first["unpruned"])
    recoveries = [stage.removeprefix("sliced") for stage in first if stage.startswith("sliced")]
    lines = [f"| model | cut | method | {' | '.join(texts)} |", "|---" * (3 + len(texts)) + "|"]
    for (model, ratio, method), draws in sorted(cells.items()):
        for recovery in recoveries:
            columns = [compared(draws, text, recovery) for text in texts]
            lines.append(f"| {model} | {ratio:.1%} | {method}{recovery} | {' | '.join(columns)} |")
    return lines


def compared(draws: list[dict[str, dict[str, float]]], text: str, recovery: str) -> str:
    """Sliced → refitted ± half the range over draws (of the damage gone), both with a recovery."""
    values = [draw["refitted" + recovery][text] for draw in draws]
    whole, cut, before = (
        mean(draw[stage][text] for draw in draws)
        for stage in ("unpruned", "sliced", "sliced" + recovery)
    )
    spread = f" ± {(max(values) - min(values)) / 2:,.1f}" if len(draws) > 1 else ""
    gone = f"{(cut - mean(values)) / (cut - whole):.0%}" if cut > whole else "no damage"
    return f"{before:,.1f} → {mean(values):,.1f}{spread} ({gone})"


def shared_parser(description: str) -> argparse.ArgumentParser:
    """With the options of this benchmark that values.py has, too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", type=existing, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--text", type=existing, metavar="FOLDER")
    parser.add_argument("--config", type=load_config, help="evaluate its suite ppl, too")
    parser.add_argument("--recover", type=int, nargs="+", default=[], metavar="STEPS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sequences", type=int, default=128, help="for selection and refit")
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time in refit")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=existing, metavar="ROWS", help="print a file of rows")
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not (options.text and options.out):
        parser.error("give --text and --out")
    if options.gpu and not torch.cuda.is_available():
        parser.error(f"--gpu: torch {torch.__version__} finds no GPU here")
    if options.recover and not (options.config and options.config.recovery):
        parser.error("--recover: give the --config whose `recovery` it is")
    for method in options.methods:
        method_named(method)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []


def write_rows(
    options: argparse.Namespace,
    rows: Callable[[Bench], Iterator[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
    **more: Any,
) -> None:
    """Append each row to the file as soon as it is known, and print a line of it; `more` is what
    else the bench has."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as work, options.out.open("a") as out:
        bench = Bench(
            options.text, "cuda" if options.gpu else "cpu", options.sequences, options.batch,
            options.config, options.recover, Path(work), **more,
        )  # fmt: skip
        for row in rows(bench):
            print(json.dumps(row), file=out, flush=True)
            print(f"{time.monotonic() - start:.0f} s  {line(row)}", flush=True)


def main() -> None:
    parser = shared_parser(__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=["drrqr", "fisher", "grad", "l1"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.75, 0.5, 0.875])
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(read_rows(options.table))))
        return
    check_options(parser, options)
    if unknown := set(options.shapes) - set(load_config(PAPER).models):
        parser.error(f"--shapes {' '.join(sorted(unknown))}: no such model in {PAPER.name}")
    done = {tuple(row[key] for key in KEY) for row in read_rows(options.out)}

    def rows(bench: Bench) -> Iterator[dict[str, Any]]:
        yield from cells(bench, options, done)
        yield from shapes(bench, options, done)

    write_rows(options, rows, line)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
