"""What the cut costs: one number of each method against the part of the channels that is gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from keycut.config import BASELINE, Config, QualityFigure, QualityTable, Stage
from keycut.reporting.frame import Cell, Key, cells, check_count, read_frame, variant_key
from keycut.reporting.style import INK, PAGE, colour, dash, label, new_figure

STAGES = {"pre": "before recovery", "post": "recovered"}
TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # in every decade
HIGHEST = 4  # times the baseline: a perplexity above it says that the model is broken, and no more


@dataclass(frozen=True)
class Panel:
    """Curves of one model before or after recovery: by method, points (ratio, cell)."""

    model: str
    stage: Stage
    baseline: float | None
    curves: Mapping[str, Sequence[tuple[float, Cell]]]


def draw_quality(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """A panel per model and stage; bars are one standard deviation over seeds.

    Perplexities stand on a logarithmic axis that ends at HIGHEST times the baseline.
    """
    spec = config.figures[name]
    assert isinstance(spec, QualityFigure)
    task = config.evaluation.suites[config.suite_of(spec.column)].tasks[spec.column]
    panels = list(read_panels(config, name, sources))
    figure = new_figure(PAGE, 2.4)
    first: dict[str, Axes] = {}  # a model's panels have one scale
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place, sharey=first.get(panel.model))
        _draw(config, axes, panel)
        if task.metric.endswith("perplexity"):
            _logarithmic(axes, panel.baseline)
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


def _draw(config: Config, axes: Axes, panel: Panel) -> None:
    if panel.baseline is not None:
        axes.axhline(
            panel.baseline,
            color=INK,
            linestyle=dash(config, BASELINE),
            label=label(config, BASELINE),
        )
    for method, points in panel.curves.items():
        known = [(100 * x, y.value, y.spread or 0.0) for x, y in points if y.value is not None]
        axes.errorbar(
            [x for x, _, _ in known], [y for _, y, _ in known], yerr=[bar for _, _, bar in known],
            color=colour(config, method), linestyle=dash(config, method),
            label=label(config, method), marker="o", markersize=2.5, elinewidth=0.8,
        )  # fmt: skip
    axes.set_title(f"{config.models[panel.model].label}\n{STAGES[panel.stage]}")
    axes.set_xlabel("channels cut, %")
    axes.set_xlim(left=0)


def _logarithmic(axes: Axes, baseline: float | None) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.minorticks_off()
    if baseline is not None:
        axes.set_ylim(top=min(axes.get_ylim()[1], HIGHEST * baseline))


def read_panels(config: Config, name: str, sources: Sequence[Path]) -> Iterator[Panel]:
    """Every curve begins at its model left whole, recovered too if the others are."""
    spec = config.figures[name]
    assert isinstance(spec, QualityFigure)
    check_count(f"figure {name}", "frames", len(spec.tables), len(sources))
    for table, source in zip(spec.tables, sources, strict=True):
        found, shown = cells(read_frame(source)), config.tables[table]
        assert isinstance(shown, QualityTable)
        for model in shown.models:
            for stage in shown.columns:
                if spec.column in config.columns(table, stage):
                    yield _panel(config, spec.column, table, model, stage, found)


def _panel(
    config: Config, column: str, table: str, model: str, stage: Stage, found: Mapping[Key, Cell]
) -> Panel:
    here = {
        variant: found[variant_key(config, variant, column)]
        for variant, of in config.cells(table)
        if of == column and variant.model == model
    }
    whole = {variant.rft: cell for variant, cell in here.items() if not variant.pruned}
    curves: dict[str, dict[float, Cell]] = {}
    for variant, cell in here.items():
        if variant.pruned and variant.rft == stage:
            start = {0.0: whole.get(stage, whole["none"])}
            curves.setdefault(variant.method, start)[variant.ratio] = cell
    return Panel(
        model, stage, whole["none"].value, {name: sorted(c.items()) for name, c in curves.items()}
    )
