"""Keys, values or both: perplexity and speed by how a smaller state is split into d_k and d_v.

    python benchmarks/values.py --gpu --models M1 M2 --text T --config C.yaml --out rows.jsonl
    python benchmarks/values.py ... --splits 64x64 --recover 200 --recover-splits 64x64
    python benchmarks/values.py --gpu --speed NAME NAME --config C.yaml --tune 12 --out speeds.jsonl
    python benchmarks/values.py --models M --text T --multiple 4 --out rows.jsonl        on a CPU
    python benchmarks/values.py --table rows.jsonl

Models, text, --config and --recover are those of refit.py. For each of --shares of the state, heads
keep fewer keys, fewer values, or fewer of both (`splits`), or what --splits says. Each cell is
sliced and refitted; those of --recover-splits are recovered, too, from both.

--speed: models of the --config by name, with random weights: parameters, speed of a layer and of
the model, decoding, and how many sequences fit, for the unpruned shape and for each split
(value_speeds.py). Nothing else may run on the machine. --tune N: compile for all shapes first, in N
processes side by side.

A row of JSON per model, method, d_k, d_v, seed and steps of recovery (with --speed: model, d_k and
d_v) is written as soon as it is known; those in the file already are not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from refit import Bench, check_options, compared, read_rows, shared_parser, write_rows

from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.calibration import calibrate_folder
from statecut.pruning.methods import METHODS
from statecut.pruning.select import select
from statecut.pruning.slicing import Change, Keep, check_sliceable, slice_model
from statecut.pruning.statistics import ModelStatistics

Split = tuple[int, int]  # d_k, d_v
Row = dict[str, Any]
KEY = ("model", "method", "d_k", "d_v", "seed", "recover")
SPEED_KEY = ("model", "d_k", "d_v")
SHARES = (1 / 2, 1 / 4, 1 / 8)
NEARLY = 0.95  # splits whose states differ by no more than this are compared by evenness
WAYS = ("keys alone", "values alone", "both")


def splits(d_k: int, d_v: int, share: float, multiple: int) -> list[Split]:
    """Widths that leave at most this share of the state and nearly all of it: keys alone, values
    alone, and both in parts as equal as multiples allow."""
    budget = share * d_k * d_v

    def fewer(width: int, most: float) -> range:
        """What is left of a width, in multiples, from the widest."""
        widest = min(int(most), width - 1) // multiple * multiple
        return range(widest, 0, -multiple)

    alone = [(width, d_v) for width in fewer(d_k, budget / d_v)[:1]]
    alone += [(d_k, width) for width in fewer(d_v, budget / d_k)[:1]]
    both = [
        (width, value_width)
        for width in fewer(d_k, d_k)
        for value_width in fewer(d_v, budget / width)[:1]
    ]
    largest = max((math.prod(split) for split in both), default=0)
    full = [split for split in both if math.prod(split) >= NEARLY * largest]

    def unevenness(split: Split) -> float:
        return round(abs(math.log(split[0] / d_k) - math.log(split[1] / d_v)), 6)

    least = min(map(unevenness, full), default=0)
    return [*alone, *(split for split in full if unevenness(split) == least)]


def splits_of(d_k: int, d_v: int, options: argparse.Namespace) -> list[Split]:
    if options.splits:
        for split in options.splits:
            if not (1 <= split[0] <= d_k and 1 <= split[1] <= d_v and split != (d_k, d_v)):
                raise InputError(
                    f"--splits {name(split)}: not less than the {name((d_k, d_v))} of a model"
                )
        return options.splits
    found = [splits(d_k, d_v, share, options.multiple) for share in options.shares]
    if empty := [share for share, widths in zip(options.shares, found, strict=True) if not widths]:
        raise InputError(
            f"--shares {empty[0]:g}: no widths that are multiples of {options.multiple} leave so "
            f"little of {name((d_k, d_v))}; give a smaller --multiple"
        )
    return list(dict.fromkeys(itertools.chain(*found)))


def name(split: Split) -> str:
    return "x".join(map(str, split))


def split_named(text: str) -> Split:
    width, _, value_width = text.partition("x")
    if not (width.isdigit() and value_width.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: d_k and d_v, as in 64x128")
    return int(width), int(value_width)


# Perplexities


def plan(options: argparse.Namespace) -> dict[Path, list[Split]]:
    """The splits of each model, all of which can be cut by all methods."""
    result = {}
    for folder in options.models:
        model = Checkpoint(folder)
        whole = (model.shape.width, model.shape.value_width)
        result[folder] = splits_of(*whole, options)
        cuts_values = any(value_width < whole[1] for _, value_width in result[folder])
        check_sliceable(model, values=cuts_values)
        for split in result[folder]:
            model.resized(*split)
        if cuts_values:
            for method in options.methods:
                if not METHODS[method].values:
                    raise InputError(f"--methods {method}: it chooses no values")
    if unknown := set(options.recover_splits) - set(itertools.chain(*result.values())):
        raise InputError(f"--recover-splits {name(min(unknown))}: none of the splits that are cut")
    return result


def cells(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[Row]:
    """A row for each cell that is not done; seeds are outermost."""
    gradients = any("gradients" in METHODS[method].needs for method in options.methods)
    unpruned: dict[Path, dict[str, float]] = {}
    for seed, (folder, widths) in itertools.product(options.seeds, plan(options).items()):
        teacher = Checkpoint(folder)
        planned = [
            {
                "model": folder.name, "method": method, "d_k": split[0], "d_v": split[1],
                "seed": seed, "recover": options.recover if split in options.recover_splits else [],
            }
            for split, method in itertools.product(widths, options.methods)
        ]  # fmt: skip
        pending = [key for key in planned if cell_of(key) not in done]
        if not pending:
            continue
        if folder not in unpruned:
            unpruned[folder] = bench.measure(folder)
        calibration = calibrate_folder(
            folder, PackedTokens(bench.text, slice_name="calibration"), name="calibration",
            sequences=bench.sequences, rows=5000, seed=seed, device=bench.device,
            gradients=gradients, values=True,
        )  # fmt: skip
        statistics = ModelStatistics(teacher, calibration)
        for key in pending:
            sliced, refitted = bench.work / "sliced", bench.work / "refitted"
            keys, values = choose(key, statistics)
            slice_model(
                teacher,
                keys,
                sliced,
                values=values,
                dtype=teacher.compute_dtype(bench.device),
                force=True,
            )
            student = Checkpoint(sliced)
            cost = bench.refit(student, teacher, seed)
            perplexities = {
                "unpruned": unpruned[folder],
                "sliced": bench.measure(sliced),
                "refitted": bench.measure(refitted),
            }
            for steps, stage in itertools.product(key["recover"], (sliced, refitted)):
                recovered = bench.recovered(stage, folder, steps)
                perplexities[f"{stage.name}, recovered {steps}"] = recovered
            yield {
                **key, **size(student), "unpruned": size(teacher), "sequences": bench.sequences,
                **cost, "perplexity": perplexities,
            }  # fmt: skip


def cell_of(row: Row) -> tuple[Any, ...]:
    return tuple(str(row[key]) for key in KEY)


def choose(key: Row, statistics: ModelStatistics) -> tuple[Change | None, Keep | None]:
    """What becomes of keys and of values, None for those that all stay."""
    method, seed, whole = key["method"], key["seed"], statistics.checkpoint.shape
    keys, values = None, None
    if key["d_k"] < whole.width:
        (selection,) = select(method, statistics, [key["d_k"]], target="kq", seed=seed)
        keys = selection.change()
    if key["d_v"] < whole.value_width:
        (selection,) = select(method, statistics, [key["d_v"]], seed=seed, channels="value")
        values = selection.value_change()
    return keys, values


def size(model: Checkpoint) -> Row:
    parameters = sum(tensor.numel() for _, tensor in model.headers())
    shape = model.shape
    return {
        "d_k": shape.width, "d_v": shape.value_width, "state_bytes": shape.state_bytes(),
        "parameters": parameters,
    }  # fmt: skip


def state_share(row: Row) -> float:
    return row["state_bytes"] / row["unpruned"]["state_bytes"]


def way_of(row: Row) -> str:
    """Which of WAYS."""
    keys, values = (row[width] < row["unpruned"][width] for width in ("d_k", "d_v"))
    return "both" if keys and values else "keys alone" if keys else "values alone"


def line(row: Row) -> str:
    """For people."""
    stages = row["perplexity"]
    texts = (
        f"{text} " + ", ".join(f"{stage} {stages[stage][text]:.2f}" for stage in stages)
        for text in stages["unpruned"]
    )
    cell = f"{row['model']} {row['method']} {name((row['d_k'], row['d_v']))} seed {row['seed']}"
    return f"{cell}: state {state_share(row):.3f}; {'; '.join(texts)}; {row['seconds']} s"


def table(rows: list[Row]) -> list[str]:
    """Markdown, means over seeds: what each split costs, sliced → refitted, and what refit brings
    back of it; then the best method's perplexity for keys alone, values alone and both."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["model"], -state_share(row), row["d_k"], row["d_v"], row["method"]].append(row)
    texts = list(rows[0]["perplexity"]["unpruned"])
    head = ["model", "d_k x d_v", "state", "parameters", "method", *texts]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (model, share, d_k, d_v, method), cells in sorted(groups.items()):
        for recovery in recoveries(cells):
            draws = [r["perplexity"] for r in cells if "sliced" + recovery in r["perplexity"]]
            parameters = cells[0]["parameters"] / cells[0]["unpruned"]["parameters"]
            columns = [
                model, f"{d_k} x {d_v}", f"{-share:.3f}", f"{parameters:.3f}", method + recovery,
                *(compared(draws, text, recovery) for text in texts),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(columns)} |")
    return [*lines, "", *best(rows, texts)]


def recoveries(rows: list[Row]) -> list[str]:
    stages = dict.fromkeys(stage for row in rows for stage in row["perplexity"])
    return [stage.removeprefix("sliced") for stage in stages if stage.startswith("sliced")]


def best(rows: list[Row], texts: list[str]) -> list[str]:
    """The lowest refitted perplexity at each share of the state, over methods and splits."""
    draws: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    unpruned: dict[tuple[str, str], float] = {}
    for row, text in itertools.product(rows, texts):
        share = min((share for share in SHARES if state_share(row) <= share), default=1.0)
        way = way_of(row)
        cell = f"{name((row['d_k'], row['d_v']))} {row['method']}"
        draws[row["model"], text, share, way, cell].append(row["perplexity"]["refitted"][text])
        unpruned[row["model"], text] = row["perplexity"]["unpruned"][text]
    lowest: dict[tuple[Any, ...], dict[str, tuple[float, str]]] = defaultdict(dict)
    for (model, text, share, way, cell), values in draws.items():
        ways = lowest[model, text, -share]
        ways[way] = min(ways.get(way, (math.inf, "")), (mean(values), cell))
    head = ["model", "text", "unpruned", "state at most", *WAYS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (model, text, share), ways in sorted(lowest.items()):
        winner = min(ways.values())
        marks = {way: "**" if value == winner else "" for way, value in ways.items()}
        columns = [
            f"{marks[way]}{ways[way][0]:,.2f}{marks[way]} ({ways[way][1]})" if way in ways else "-"
            for way in WAYS
        ]
        known = [model, text, f"{unpruned[model, text]:,.2f}", f"{-share:g}"]
        lines.append(f"| {' | '.join([*known, *columns])} |")
    return lines


# Speeds


def time_shapes(options: argparse.Namespace) -> None:
    """A row for each shape that has none, that of the unpruned model first."""
    import value_speeds

    config = options.config
    value_speeds.benchmarks(config)
    rows = {tuple(row[key] for key in SPEED_KEY): row for row in read_rows(options.out)}
    pending, whole = [], {}
    for model in options.speed:
        shape = config.models[model].mixer_shape
        whole[model] = (shape.width, shape.value_width)
        for split in [whole[model], *splits_of(*whole[model], options)]:
            if (model, *split) not in rows:
                pending.append((model, split))
    if options.tune:
        for message in value_speeds.tune(pending, config, options.tune):
            print(message, flush=True)
    device = "cuda" if options.gpu else "cpu"
    with options.out.open("a") as out:
        for row in value_speeds.measure_rows(pending, config, device, options.seconds):
            model = row["model"]
            row = value_speeds.with_ratios(row, rows.get((model, *whole[model]), row))
            rows[(model, row["d_k"], row["d_v"])] = row
            print(json.dumps(row), file=out, flush=True)
            print(value_speeds.table([row])[-1], flush=True)


def main() -> None:
    parser = shared_parser(__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["drrqr", "fisher", "l1"])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), metavar="SHARE",
                        help="of the state that are left")  # fmt: skip
    parser.add_argument("--multiple", type=int, default=16, help="of which widths are multiples")
    parser.add_argument("--splits", type=split_named, nargs="+", default=[], metavar="KxV",
                        help="d_k and d_v, instead of --shares")  # fmt: skip
    parser.add_argument("--recover-splits", type=split_named, nargs="+", default=[], metavar="KxV",
                        help="which of them --recover is for")  # fmt: skip
    parser.add_argument("--speed", nargs="+", default=[], metavar="NAME",
                        help="time these models of --config instead")  # fmt: skip
    parser.add_argument("--tune", type=int, default=0, metavar="N",
                        help="compile for all shapes first, N processes at once")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed runs for one figure")
    options = parser.parse_args()
    if options.table:
        rows = [row for row in read_rows(options.table) if "d_v" in row]
        if not rows:
            parser.error(f"--table {options.table}: it has no row of this benchmark")
        if speeds := [row for row in rows if "speeds" in row]:
            import value_speeds

            print("\n".join(value_speeds.table(speeds)))
        if perplexities := [row for row in rows if "perplexity" in row]:
            print("\n".join(table(perplexities)))
        return
    if options.multiple < 1:
        parser.error(f"--multiple {options.multiple}: 1 or more")
    for share in options.shares:
        if not 0 < share < 1:
            parser.error(f"--shares {share:g}: must lie between 0 and 1")
    if options.speed:
        if not (options.config and options.out):
            parser.error("--speed: give the --config whose models these are, and --out")
        if unknown := set(options.speed) - set(options.config.models):
            models = ", ".join(options.config.models)
            parser.error(f"--speed {min(unknown)}: no such model in --config; it has {models}")
        if options.gpu and not torch.cuda.is_available():
            parser.error(f"--gpu: torch {torch.__version__} finds no GPU here")
        if options.tune and not options.gpu:
            parser.error("--tune: give --gpu; there is nothing to compile on a CPU")
        time_shapes(options)
        return
    check_options(parser, options)
    if not options.models:
        parser.error("give --models or --speed")
    if bool(options.recover) != bool(options.recover_splits):
        parser.error("give both of --recover and --recover-splits, or none")
    plan(options)
    done = {cell_of(row) for row in read_rows(options.out)}
    write_rows(options, lambda bench: cells(bench, options, done), line)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
