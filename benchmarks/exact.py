"""What of a cut's damage is lost channels, and what is the eps of the output norm.

    python benchmarks/exact.py --gpu --models M1 M2 --text T --also W --out rows.jsonl
    python benchmarks/exact.py ... --config config/lab.yaml --recover 100
    python benchmarks/exact.py ... --splits 64x64 128x32 --ways kept keys exact eps
    python benchmarks/exact.py ... --ratios 0.75 --ways exact --factors 0.5 0.71 1 1.41 2
    python benchmarks/exact.py ... --other-norms
    python benchmarks/exact.py --table rows.jsonl                                  as Markdown

Models are folders of unpruned ones; options are those of refit.py. Text is packed (`statecut pack`)
with slices `calibration`, `held_out` and with --recover `recovery`; each folder of --also is packed
text whose perplexity is computed, too. Keys are cut by --ratios, or keys and values to --splits.
--ways are what a cut does beside leaving channels out:

    kept    nothing
    keys    eps times D/k, whatever becomes of the values
    exact   eps times D/k V/v, the output projection times sqrt(V/v): what `statecut prune` does
    eps     as exact, without the factor of the projection

--factors multiply the eps that follows. --other-norms: nothing is cut; the eps of all norms but the
output norms is multiplied, as it is by a cut where a config has one eps for all.

A row of JSON per model, method, widths, way and factor is written as soon as it is known; those in
the file already are not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from arguments import existing
from refit import Bench, check_options, read_rows, shared_parser, write_rows

from statecut.arguments import width as width_of
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.files import write_json
from statecut.models import load
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.calibration import calibrate_folder
from statecut.pruning.methods import METHODS
from statecut.pruning.select import select
from statecut.pruning.slicing import slice_model
from statecut.pruning.statistics import ModelStatistics
from statecut.recovery.training import scale_eps

Row = dict[str, Any]
Split = tuple[int, int]  # d_k and d_v
KEY = ("model", "method", "d_k", "d_v", "way", "factor", "recover")
WAYS = ("kept", "keys", "exact", "eps")
STAGES = ("sliced", "refitted")
OTHER_NORMS = "other norms"  # the method of rows of uncut models


def split_named(text: str) -> Split:
    width, _, value_width = text.partition("x")
    if not (width.isdigit() and value_width.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: d_k and d_v, as in 64x128")
    return int(width), int(value_width)


def set_eps(folder: Path, factor: float) -> None:
    """Multiply the eps in the config of a model."""
    model = Checkpoint(folder)
    write_json(folder / "config.json", model.architecture.scaled_eps(model.config, factor))


def cut(
    teacher: Checkpoint, channels: dict[str, Any], way: str, factor: float, out: Path, device: str
) -> None:
    """Write a model cut in one of the ways."""
    slice_model(
        teacher, channels["keys"], out, values=channels["values"],
        dtype=teacher.compute_dtype(device), eps="matched" if way == "exact" else "kept",
        force=True,
    )  # fmt: skip
    whole, small = teacher.shape, Checkpoint(out).shape
    exact = teacher.architecture.eps_factor(whole, small)
    missing = {"keys": whole.width / small.width, "eps": exact}
    set_eps(out, factor * missing.get(way, 1))


def rows(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[Row]:
    gradients = any("gradients" in METHODS[method].needs for method in options.methods)
    for folder in options.models:
        teacher, unpruned = Checkpoint(folder), bench.measure(folder)
        whole = (teacher.shape.width, teacher.shape.value_width)
        splits: list[Split] = options.splits or [
            (width_of(whole[0], ratio), whole[1]) for ratio in options.ratios
        ]
        calibration = calibrate_folder(
            folder, PackedTokens(bench.text, slice_name="calibration"), name="calibration",
            sequences=bench.sequences, rows=5000, seed=options.seed, device=bench.device,
            gradients=gradients, values=any(split[1] < whole[1] for split in splits),
        )  # fmt: skip
        statistics = ModelStatistics(teacher, calibration)
        for method, split in itertools.product(options.methods, splits):
            choose = {
                "keys": partial(select, target="kq"),
                "values": partial(select, channels="value"),
            }
            channels: dict[str, Any] = {"keys": None, "values": None}
            for (side, function), width, full in zip(choose.items(), split, whole, strict=True):
                if width < full:
                    (chosen,) = function(method, statistics, [width], seed=options.seed)
                    change = chosen.change if side == "keys" else chosen.value_change
                    channels[side] = change()
            for way, factor in itertools.product(options.ways, options.factors):
                key = (folder.name, method, *split, way, factor, sum(bench.steps))
                if key in done:
                    continue
                sliced, refitted = bench.work / "sliced", bench.work / "refitted"
                cut(teacher, channels, way, factor, sliced, bench.device)
                bench.refit(Checkpoint(sliced), teacher, options.seed)
                values = {
                    "unpruned": unpruned,
                    "sliced": bench.measure(sliced),
                    "refitted": bench.measure(refitted),
                }
                for steps, student in itertools.product(bench.steps, (sliced, refitted)):
                    values[f"{student.name}, recovered"] = bench.recovered(student, folder, steps)
                eps = teacher.architecture.eps(Checkpoint(sliced).config)
                yield {**dict(zip(KEY, key, strict=True)), "eps": eps, "perplexity": values}


def other_norms(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator:
    """In memory: what a larger eps of all norms but the output norms does to an uncut model."""
    for folder, factor in itertools.product(options.models, options.factors):
        shape = Checkpoint(folder).shape
        key = (folder.name, OTHER_NORMS, shape.width, shape.value_width, "exact", factor, 0)
        if key in done:
            continue
        model = load(
            folder, device=bench.device, dtype=Checkpoint(folder).compute_dtype(bench.device)
        )
        texts = bench.texts()
        unpruned = {text: in_memory(model, ids) for text, ids in texts.items()}
        scale_other_norms(model, factor)
        scaled = {text: in_memory(model, ids) for text, ids in texts.items()}
        values = {"unpruned": unpruned, "sliced": scaled}
        yield {**dict(zip(KEY, key, strict=True)), "perplexity": values}


def scale_other_norms(model: Any, factor: float) -> None:
    """Multiply the eps of all norms but the output norms."""
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, getattr(module, name) * factor)
    scale_eps(model, 1 / factor)


@torch.no_grad()
def in_memory(model: Any, ids: torch.Tensor) -> float:
    """The perplexity of (sequences, length) tokens."""
    losses = [
        model(part.to(model.device), labels=part.to(model.device), use_cache=False).loss.double()
        for part in ids.split(4)
    ]
    return torch.stack(losses).mean().exp().item()


def line(row: Row) -> str:
    """For people."""
    texts = row["perplexity"]["unpruned"]
    parts = [
        f"{text} " + ", ".join(f"{stage} {v[text]:.2f}" for stage, v in row["perplexity"].items())
        for text in texts
    ]
    return f"{' '.join(str(row[key]) for key in KEY)}: {'; '.join(parts)}"


def table(rows: list[Row]) -> list[str]:
    """Markdown: keys with eps kept → exact, values by ways, factors of eps, other norms."""
    widest: dict[str, int] = defaultdict(int)
    for row in rows:
        widest[row["model"]] = max(widest[row["model"]], row["d_v"])
    parts: dict[str, list[tuple[str, str, str, str]]] = defaultdict(list)

    def add(title: str, row: Row, column: str, stages: Sequence[str], texts: Sequence[str]) -> None:
        """A cell: each of these perplexities, in a line of its model and cut."""
        values, width = row["perplexity"], f"{row['d_k']} x {row['d_v']}"
        unpruned, cell = (
            " / ".join(f"{values[stage][text]:.1f}" for stage in some for text in texts)
            for some in (["unpruned"], stages)
        )
        parts[title].append(
            (f"{row['model']} ({unpruned})", f"{row['method']}, {width}", column, cell)
        )

    for row in sorted(rows, key=lambda row: (row["method"], -row["d_k"], -row["d_v"])):
        texts, factor = list(row["perplexity"]["unpruned"]), f"x {row['factor']:g}"
        if row["method"] == OTHER_NORMS:
            add("other norms, " + " / ".join(texts), row, factor, ["sliced"], texts)
        elif row["recover"]:
            for text, stage in itertools.product(texts, list(row["perplexity"])[1:]):
                add(f"kept → exact, {text}", row, stage, [stage], [text])
        elif row["d_v"] < widest[row["model"]]:
            add(f"sliced / refitted by ways, {texts[0]}", row, row["way"], STAGES, texts[:1])
        else:
            add(f"sliced / refitted by factors, {texts[0]}", row, factor, STAGES, texts[:1])
    return list(itertools.chain(*(pivot(title, cells) for title, cells in parts.items())))


def pivot(title: str, cells: list[tuple[str, str, str, str]]) -> list[str]:
    """A line per model and cut; what stands in one place is joined by arrows."""
    lines: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for model, cut, column, text in cells:
        lines[model, cut][column].append(text)
    columns = list(dict.fromkeys(column for _, _, column, _ in cells))
    heads = ["model (unpruned)", "cut to", *columns]
    result = [f"{title}:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (model, cut), by_column in sorted(lines.items(), key=lambda line: line[0][0]):
        result.append(
            f"| {model} | {cut} | {' | '.join(' → '.join(by_column[c]) for c in columns)} |"
        )
    return [*result, ""]


def main() -> None:
    parser = shared_parser(__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["fisher", "drrqr"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.75, 0.5, 0.875])
    parser.add_argument("--splits", type=split_named, nargs="+", metavar="D_KxD_V")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["kept", "exact"])
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0])
    parser.add_argument("--also", type=existing, nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--other-norms", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(read_rows(options.table))))
        return
    check_options(parser, options)
    if len(options.seeds) > 1 or len(options.recover) > 1:
        parser.error("give one of --seeds, and one of --recover: a row has no place for more")
    (options.seed,) = options.seeds
    done = {tuple(row[key] for key in KEY) for row in read_rows(options.out)}
    work = other_norms if options.other_norms else rows
    write_rows(
        options,
        lambda bench: work(bench, options, done),
        line,
        also=tuple(options.also),
        suite=False,
    )


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
