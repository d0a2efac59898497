"""The cost of pruning: a metric of each method against the fraction of channels that was cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import fill

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from reproduction.config import BASELINE, Config, QualityFigure, QualityTable, Stage
from reproduction.reporting.frame import Cell, cells, check_count, read_frame, variant_key
from reproduction.reporting.style import INK, PAGE, colour, dash, label, new_figure

STAGES = {
    "pre": "before recovery",
    "refit": "refitted",
    "post": "recovered",
    "refit_post": "refitted and recovered",
}
TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # in every decade
COLUMNS, TITLE = 4, 22  # panels in a row, characters in a line of their titles
HIGHEST = 4  # times the baseline: the model is broken above it, and how much does not matter


@dataclass(frozen=True)
class Panel:
    """Curves of one model at one stage: by method, cells by ratio."""

    model: str
    stage: Stage
    baseline: float | None
    curves: dict[str, dict[float, Cell]]

    @property
    def measured(self) -> bool:
        points = (cell.value for points in self.curves.values() for cell in points.values())
        return any(value is not None for value in (self.baseline, *points))


def draw_quality(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """A panel per model and stage; bars are one standard deviation over seeds.

    Perplexities stand on a logarithmic axis that ends at HIGHEST times the baseline.
    """
    spec = config.figures[name]
    assert isinstance(spec, QualityFigure)
    task = config.suite_of(spec.column).tasks[spec.column]
    rows = in_rows(read_panels(config, name, sources))
    figure = new_figure(PAGE, 0.6 + 1.8 * len(rows))
    grid = figure.add_gridspec(len(rows), max(map(len, rows)))
    first: dict[str, Axes] = {}  # the panels of a model share their scale
    places = ((grid[r, c], panel) for r, row in enumerate(rows) for c, panel in enumerate(row))
    for place, panel in places:
        axes = figure.add_subplot(place, sharey=first.get(panel.model))
        _draw(config, axes, panel)
        if not panel.measured:
            mark_empty(axes)
        elif task.metric.endswith("perplexity"):
            set_logarithmic(axes, panel.baseline)
        if panel.model in first:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel(f"{task.label}, {task.metric.replace('_', ' ')}")
        first.setdefault(panel.model, axes)
    names: dict[str, Artist] = {}
    for axes in figure.axes:
        lines, texts = axes.get_legend_handles_labels()
        names |= zip(texts, lines, strict=True)
    figure.legend(
        list(names.values()), list(names), loc="outside lower center", ncols=len(names),
        frameon=False, fontsize=7,
    )  # fmt: skip
    return figure


def in_rows(panels: Iterable[Panel]) -> list[list[Panel]]:
    """Rows of panels that are wide enough to read; those of a model stand side by side."""
    rows: list[list[Panel]] = [[]]
    for _, group in groupby(panels, lambda panel: panel.model):
        of_model = list(group)
        if rows[-1] and len(rows[-1]) + len(of_model) > COLUMNS:
            rows.append([])
        rows[-1] += of_model
    return rows


def _draw(config: Config, axes: Axes, panel: Panel) -> None:
    if panel.baseline is not None:
        name, style = label(config, BASELINE), dash(config, BASELINE)
        axes.axhline(panel.baseline, color=INK, linestyle=style, label=name)
    for method, points in panel.curves.items():
        measured = [
            (100 * ratio, cell.value, cell.spread or 0.0)
            for ratio, cell in sorted(points.items())
            if cell.value is not None
        ]
        x, y, bars = zip(*measured, strict=True) if measured else ((), (), ())
        axes.errorbar(
            x, y, yerr=bars, color=colour(config, method), linestyle=dash(config, method),
            label=label(config, method), marker="o", markersize=2.5, elinewidth=0.8,
        )  # fmt: skip
    model = fill(config.models[panel.model].label, TITLE)
    axes.set_title(f"{model}\n{STAGES[panel.stage]}")
    axes.set_xlabel("channels cut, %")
    axes.set_xlim(left=0)


def mark_empty(axes: Axes) -> None:
    """A panel of which a partial run has nothing."""
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
    axes.set(xticks=[], yticks=[])


def set_logarithmic(axes: Axes, baseline: float | None) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.minorticks_off()
    if baseline is not None:
        axes.set_ylim(top=min(axes.get_ylim()[1], HIGHEST * baseline))


def read_panels(config: Config, figure: str, sources: Sequence[Path]) -> Iterator[Panel]:
    """Every curve begins at its unpruned model, after recovery if the run has that."""
    spec = config.figures[figure]
    assert isinstance(spec, QualityFigure)
    check_count(f"figure {figure}", "frames", len(spec.tables), len(sources))
    for name, source in zip(spec.tables, sources, strict=True):
        measured, table = cells(read_frame(source)), config.tables[name]
        assert isinstance(table, QualityTable)
        for model in table.models:
            variants = {
                variant: measured[variant_key(config, variant, column)]
                for variant, column in config.cells(name)
                if (variant.model, column) == (model, spec.column)
            }
            unpruned = {v.recovered: cell for v, cell in variants.items() if not v.pruned}
            for stage in table.columns:
                if spec.column not in config.columns(name, stage):
                    continue
                curves: dict[str, dict[float, Cell]] = {}
                for variant, cell in variants.items():
                    if variant.pruned and variant.rft == stage:
                        start = {0.0: unpruned.get(variant.recovered, unpruned[False])}
                        curves.setdefault(variant.method, start)[variant.ratio] = cell
                yield Panel(model, stage, unpruned[False].value, curves)
