"""What a smaller state costs: a metric of every method and stage against the state's size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from reproduction.config import BASELINE, Config, QualityFigure, state_bytes
from reproduction.reporting.figures.quality import (
    STAGES,
    Panel,
    mark_empty,
    read_panels,
    set_logarithmic,
)
from reproduction.reporting.style import INK, PAGE, SOLID, colour, dash, label, new_figure

DASHED = (0, (3, 1.5))
# Refitted models have solid lines, recovered ones full circles.
LOOKS: dict[str, dict[str, Any]] = {
    "pre": {"linestyle": DASHED, "markerfacecolor": "none"},
    "refit": {"linestyle": SOLID, "markerfacecolor": "none"},
    "post": {"linestyle": DASHED},
    "refit_post": {"linestyle": SOLID},
}


def draw_state(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """A panel per model, a curve per method and stage, each from the unpruned model on.

    Both axes are logarithmic; that of perplexities as in `draw_quality`.
    """
    spec = config.figures[name]
    assert isinstance(spec, QualityFigure)
    task = config.suite_of(spec.column).tasks[spec.column]
    panels = list(read_panels(config, name, sources))
    models = list(dict.fromkeys(panel.model for panel in panels))
    figure = new_figure(PAGE, 2.8)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        parts = [panel for panel in panels if panel.model == model]
        _draw(config, axes, parts)
        if not any(panel.measured for panel in parts):
            mark_empty(axes)
        elif task.metric.endswith("perplexity"):
            set_logarithmic(axes, parts[0].baseline)
    figure.axes[0].set_ylabel(f"{task.label}, {task.metric.replace('_', ' ')}")
    methods = dict.fromkeys(method for panel in panels for method in panel.curves)
    lines = [Line2D([], [], color=colour(config, m), label=label(config, m)) for m in methods]
    names = {**STAGES, "pre": "sliced"}
    for stage in dict.fromkeys(panel.stage for panel in panels):
        look = LOOKS[stage] | {"color": INK, "marker": "o", "markersize": 3}
        lines.append(Line2D([], [], label=names[stage], **look))
    lines.append(Line2D([], [], color=INK, linestyle=dash(config, BASELINE), label="Baseline"))
    figure.legend(
        handles=lines,
        loc="outside lower center",
        ncols=min(5, len(lines)),
        frameon=False,
        fontsize=7,
    )
    return figure


def _draw(config: Config, axes: Axes, panels: Sequence[Panel]) -> None:
    model = config.models[panels[0].model]
    if (baseline := panels[0].baseline) is not None:
        axes.axhline(baseline, color=INK, linestyle=dash(config, BASELINE))
    sizes = set[float]()
    for panel in panels:
        for method, points in panel.curves.items():
            measured = [
                (state_bytes(model, ratio) / 1024, cell.value, cell.spread or 0.0)
                for ratio, cell in sorted(points.items())
                if cell.value is not None
            ]
            x, y, bars = zip(*measured, strict=True) if measured else ((), (), ())
            sizes |= {*x}
            axes.errorbar(
                x, y, yerr=bars, color=colour(config, method), marker="o", markersize=3,
                elinewidth=0.8, **LOOKS[panel.stage],
            )  # fmt: skip
    axes.set_title(model.label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(sizes)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.minorticks_off()
    axes.set_xlabel("state of a sequence, KiB")
