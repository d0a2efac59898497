"""Figures: one file per kind of data, from what a run has measured to PDF for LaTeX and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from reproduction.config import Config
from reproduction.reporting.figures.filters import draw_filters
from reproduction.reporting.figures.quality import draw_quality, draw_state
from reproduction.reporting.figures.rank import draw_spectrum, draw_utilization
from reproduction.reporting.figures.sweep import draw_sweep
from reproduction.reporting.style import drawing, save

KINDS: dict[str, Callable[[Config, str, Sequence[Any]], Figure]] = {
    "spectrum": draw_spectrum,
    "utilization": draw_utilization,
    "filters": draw_filters,
    "sweep": draw_sweep,
    "quality": draw_quality,
    "state": draw_state,
}


def draw(
    config: Config, name: str, sources: Sequence[Path | str | None], outs: Sequence[Path | str]
) -> None:
    """Draw a figure of the configuration from the files that `rules.Inputs.figure_sources` names,
    and write it in the form that each file's ending says."""
    paths = [source and Path(source) for source in sources]
    with drawing():
        save(KINDS[config.figures[name].kind](config, name, paths), outs)
