"""The cost of pruning: a metric of each method against the fraction of channels that was cut
(quality), or of each method and stage against the size of the state that is left (state)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from reproduction.config import BASELINE, Config, Cut, Stage, cut_shape
from reproduction.config.models import Model
from reproduction.reporting.frame import Cell, cells, read_results, variant_key
from reproduction.reporting.grid import STAGES
from reproduction.reporting.style import INK, PAGE, SOLID, colour, dash, label, new_figure

TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # in every decade
COLUMNS, TITLE = 4, 22  # panels in a row, characters in a line of their titles
HIGHEST = 4  # times the baseline: the model is broken above it, and how much does not matter
DASHED = (0, (3, 1.5))
# Against the state, refitted models have solid lines, recovered ones full circles.
LOOKS: dict[str, dict[str, Any]] = {
    "pre": {"linestyle": DASHED, "markerfacecolor": "none"},
    "refit": {"linestyle": SOLID, "markerfacecolor": "none"},
    "post": {"linestyle": DASHED},
    "refit_post": {"linestyle": SOLID},
}
PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}")


@dataclass(frozen=True)
class Panel:
    """Curves of one model at one stage: by method, cells by what was cut."""

    model: str
    stage: Stage
    baseline: float | None
    curves: dict[str, dict[Cut, Cell]]


def draw_quality(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """A panel per model and stage."""
    rows = in_rows(read_panels(config, name, sources))
    figure = new_figure(PAGE, 0.6 + 1.8 * len(rows))
    grid = figure.add_gridspec(len(rows), max(map(len, rows)))
    first: dict[str, Axes] = {}  # the panels of a model share their scale
    names: dict[str, Any] = {}
    places = ((grid[r, c], panel) for r, row in enumerate(rows) for c, panel in enumerate(row))
    for place, panel in places:
        axes = figure.add_subplot(place, sharey=first.get(panel.model))
        _draw_baseline(config, axes, panel)
        for method in panel.curves:
            look = {"linestyle": dash(config, method), "markersize": 2.5}
            _draw_curve(config, axes, panel, method, lambda _, ratio: 100 * ratio, look)
        axes.set_title(f"{fill(config.models[panel.model].label, TITLE)}\n{STAGES[panel.stage]}")
        axes.set_xlabel("channels cut, %")
        axes.set_xlim(left=0)
        column = config.figures[name].column  # type: ignore[union-attr]
        _finish(config, column, axes, [panel], labelled=panel.model not in first)
        if panel.model in first:
            axes.tick_params(labelleft=False)
        first.setdefault(panel.model, axes)
        lines, texts = axes.get_legend_handles_labels()
        names |= zip(texts, lines, strict=True)
    _legend(figure, list(names.values()), len(names))
    return figure


def draw_state(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """Axes per model, a curve per method and stage, each from the unpruned model on."""
    panels = list(read_panels(config, name, sources))
    models = list(dict.fromkeys(panel.model for panel in panels))
    figure = new_figure(PAGE, 2.8)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        spec, parts = config.models[model], [panel for panel in panels if panel.model == model]
        _draw_baseline(config, axes, parts[0])
        sizes = set[float]()
        for panel in parts:
            for method in panel.curves:
                look = LOOKS[panel.stage] | {"markersize": 3}
                sizes |= _draw_curve(config, axes, panel, method, _kib, look)
        axes.set_title(spec.label)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted(sizes)))
        axes.xaxis.set_major_formatter(PLAIN)
        axes.minorticks_off()
        axes.set_xlabel("state of a sequence, KiB")
        column = config.figures[name].column  # type: ignore[union-attr]
        _finish(config, column, axes, parts, labelled=model == models[0])
    methods = dict.fromkeys(method for panel in panels for method in panel.curves)
    lines = [Line2D([], [], color=colour(config, m), label=label(config, m)) for m in methods]
    for stage in dict.fromkeys(panel.stage for panel in panels):
        look = LOOKS[stage] | {"color": INK, "marker": "o", "markersize": 3}
        lines.append(Line2D([], [], label=STAGES[stage], **look))
    lines.append(Line2D([], [], color=INK, linestyle=dash(config, BASELINE), label="Baseline"))
    _legend(figure, lines, min(5, len(lines)))
    return figure


def _kib(model: Model, cut: Cut) -> float:
    """The recurrent state of one sequence, in all layers."""
    return cut_shape(model, cut).state_bytes() / 1024


def in_rows(panels: Iterable[Panel]) -> list[list[Panel]]:
    """Rows of panels that are wide enough to read; those of a model stand side by side."""
    rows: list[list[Panel]] = [[]]
    for _, group in groupby(panels, lambda panel: panel.model):
        of_model = list(group)
        if rows[-1] and len(rows[-1]) + len(of_model) > COLUMNS:
            rows.append([])
        rows[-1] += of_model
    return rows


def _draw_baseline(config: Config, axes: Axes, panel: Panel) -> None:
    if panel.baseline is not None:
        style, name = dash(config, BASELINE), label(config, BASELINE)
        axes.axhline(panel.baseline, color=INK, linestyle=style, label=name)


def _draw_curve(
    config: Config,
    axes: Axes,
    panel: Panel,
    method: str,
    place: Callable[[Model, Any], float],
    look: dict[str, Any],
) -> set[float]:
    """A curve with bars of one standard deviation over seeds; its places on the x axis."""
    cuts, spec = panel.curves[method].items(), config.models[panel.model]
    measured = [
        (place(spec, cut), cell.value, cell.spread or 0.0)
        for cut, cell in sorted(cuts, key=lambda item: -_kib(spec, item[0]))
        if cell.value is not None
    ]
    x, y, bars = zip(*measured, strict=True) if measured else ((), (), ())
    shown: dict[str, Any] = {"color": colour(config, method), "label": label(config, method)}
    axes.errorbar(x, y, yerr=bars, marker="o", elinewidth=0.8, **shown, **look)
    return {*x}


def _finish(
    config: Config, column: str, axes: Axes, panels: Sequence[Panel], *, labelled: bool
) -> None:
    """The y axis: logarithmic of perplexities, and none of what a partial run has nothing of."""
    task = config.suite_of(column).tasks[column]
    curves = [curve for panel in panels for curve in panel.curves.values()]
    if panels[0].baseline is None and all(c.value is None for k in curves for c in k.values()):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
    elif task.metric.endswith("perplexity"):
        set_logarithmic(axes, panels[0].baseline)
    if labelled:
        axes.set_ylabel(f"{task.label}, {task.metric.replace('_', ' ')}")


def _legend(figure: Figure, handles: list[Any], columns: int) -> None:
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=7
    )


def set_logarithmic(axes: Axes, baseline: float | None) -> None:
    """Up to HIGHEST times the baseline."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=TICKS))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.minorticks_off()
    if baseline is not None:
        axes.set_ylim(top=min(axes.get_ylim()[1], HIGHEST * baseline))


def read_panels(config: Config, figure: str, sources: Sequence[Path]) -> Iterator[Panel]:
    """Every curve begins at its unpruned model, after recovery if the run has that."""
    spec: Any = config.figures[figure]
    for name, source in zip(spec.tables, sources, strict=True):
        measured, table = cells(read_results(source)), config.tables[name]
        for model in table.models:  # type: ignore[union-attr]
            variants = {
                variant: measured[variant_key(config, variant, column)]
                for variant, column in config.cells(name)
                if (variant.model, column) == (model, spec.column)
            }
            unpruned = {v.recovered: cell for v, cell in variants.items() if not v.pruned}
            for stage in table.columns:  # type: ignore[union-attr]
                if spec.column not in config.columns(name, stage):
                    continue
                curves: dict[str, dict[Cut, Cell]] = {}
                for variant, cell in variants.items():
                    if spec.kind == "quality" and isinstance(variant.ratio, str):
                        continue  # no fraction of the keys
                    if variant.pruned and variant.rft == stage:
                        start = unpruned.get(variant.recovered, unpruned[False])
                        curves.setdefault(variant.method, {0.0: start})[variant.ratio] = cell
                yield Panel(model, stage, unpruned[False].value, curves)
