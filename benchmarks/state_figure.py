"""One figure: is it better to cut the state or to hold it in fewer bits, and what is forgotten?

    python benchmarks/state_figure.py --precision P.jsonl --recall R.jsonl --out state.svg

P.jsonl: rows of state_precision.py, the perplexity of text held out (upper panels). R.jsonl: rows
of recall.py, percent of answers that are right, mean over numbers of pairs and seeds (lower
panels). Both against the bytes of a state, as a share of those of the whole one in float32. Of
types with the same bytes the best one is drawn.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from arguments import existing
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from refit import read_rows
from state_precision import OWN_KERNELS, TYPES

from reproduction.config import Config, load_config
from reproduction.reporting.figures.quality import set_logarithmic
from reproduction.reporting.style import INK, PAGE, SOLID, colour, drawing, label, new_figure, save

CONFIG = Path(__file__).parents[1] / "config" / "lab.yaml"  # names and colours of methods
DASHED, DOTTED = (0, (3, 1.5)), (0, (1, 1.2))
WHOLE = "whole, in fewer bits"
PERPLEXITY = "perplexity, text held out"
PLAIN = "float32"  # as engines hold it
LOOKS: dict[str, dict[str, Any]] = {
    WHOLE: {"linestyle": SOLID, "marker": "s"},
    "sliced": {"linestyle": DASHED, "marker": "o", "markerfacecolor": "none"},
    "refitted": {"linestyle": SOLID, "marker": "o", "markerfacecolor": "none"},
    "refitted, in fewer bits": {"linestyle": DOTTED, "marker": "o", "markerfacecolor": "none"},
    "recovered": {"linestyle": SOLID, "marker": "o"},
}
LABELS = {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet"}

Points = dict[float, float]  # a share of the state's bytes to a figure
Curves = dict[tuple[str | None, str], Points]  # of a method (None: whole) and a look


def precision_curves(rows: Iterable[dict[str, Any]]) -> dict[str, Curves]:
    """Of each model: perplexities, the lowest where several types have the same bytes."""
    rows = list(rows)
    whole = {row["model"]: row for row in rows if row["method"] is None and row["state"] == PLAIN}
    panels: dict[str, Curves] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["state"] == OWN_KERNELS:
            continue
        unpruned = whole[row["model"]]
        curves = panels[row["model"]]
        for look in looks(row):
            points = curves[row["method"], look]
            if look in ("sliced", "refitted"):  # from the unpruned model on
                points[1.0] = unpruned["perplexity"]
            share = row["bytes"] / unpruned["bytes"]
            points[share] = min(points.get(share, float("inf")), row["perplexity"])
    return panels


def looks(row: dict[str, Any]) -> list[str]:
    """The curves that a row is on. Those in fewer bits begin in float32, one for each ratio."""
    if row["method"] is None:
        return [WHOLE]
    if row["stage"] == "sliced":
        return ["sliced"]
    fewer_bits = f"refitted, in fewer bits/{row['ratio']}"
    return ["refitted", fewer_bits] if row["state"] == PLAIN else [fewer_bits]


def recall_curves(rows: Iterable[dict[str, Any]]) -> dict[str, Curves]:
    """Of each model: percent right, the highest where several types have the same bytes."""
    rows = list(rows)
    full = {row["model"]: row["width"] for row in rows if row["method"] is None}
    draws: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        for stage, by_pairs in row["accuracy"].items():
            name, _, state = stage.partition(", ")
            size = TYPES[state].itemsize if state else 4
            share = row["width"] / full[row["model"]] * size / 4
            look = WHOLE if name == "unpruned" else name
            key = (row["model"], row["method"], look, share, state)
            draws[key].append(100 * mean(by_pairs.values()))
    panels: dict[str, Curves] = defaultdict(lambda: defaultdict(dict))
    for (model, method, look, share, _), values in draws.items():
        points = panels[model][method, look]
        points[share] = max(points.get(share, 0.0), mean(values))
        if look != WHOLE:  # from the unpruned model on
            points[1.0] = mean(draws[model, None, WHOLE, 1.0, ""])
    return panels


def draw(axes: Axes, curves: Curves, config: Config) -> None:
    shares = set[float]()
    for (method, name), points in curves.items():
        look = name.partition("/")[0]
        x, y = zip(*sorted(points.items()), strict=True)
        shares |= {*x}
        axes.plot(
            x, y, color=colour(config, method) if method else INK, markersize=3, **LOOKS[look]
        )
    axes.set_xscale("log", base=2)
    ticks = [2.0**-power for power in range(8) if 2.0**-power >= 0.9 * min(shares)]
    axes.set_xticks(ticks, [f"1/{1 / tick:.0f}" if tick < 1 else "1" for tick in ticks])
    axes.set_xlabel("bytes of the state, of all in float32")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", type=existing, required=True, metavar="ROWS")
    parser.add_argument("--recall", type=existing, required=True, metavar="ROWS")
    parser.add_argument("--out", type=Path, required=True, help=".svg, .pdf or .png")
    options = parser.parse_args()
    config = load_config(CONFIG)
    parts = {
        PERPLEXITY: precision_curves(read_rows(options.precision)),
        "answers right, %": recall_curves(read_rows(options.recall)),
    }
    with drawing():
        figure = new_figure(PAGE, 4.6)
        columns = max(map(len, parts.values()))
        grid = figure.subplots(len(parts), columns, squeeze=False)
        for line, (title, panels) in zip(grid, parts.items(), strict=True):
            for axes, (model, curves) in zip(line, panels.items(), strict=False):
                draw(axes, curves, config)
                known = config.models[model].label if model in config.models else LABELS[model]
                axes.set_title(known)
                if title == PERPLEXITY:
                    set_logarithmic(axes, curves[None, WHOLE][1.0])
            line[0].set_ylabel(title)
            for axes in line[len(panels) :]:
                axes.set_visible(False)
        used = [key for panels in parts.values() for curves in panels.values() for key in curves]
        methods = dict.fromkeys(method for method, _ in used if method)
        drawn = dict.fromkeys(look.partition("/")[0] for _, look in used)
        handles = [Line2D([], [], color=colour(config, m), label=label(config, m)) for m in methods]
        handles += [
            Line2D([], [], color=INK, markersize=3, label=look, **LOOKS[look]) for look in drawn
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=7
        )
        save(figure, [options.out])


if __name__ == "__main__":
    main()
