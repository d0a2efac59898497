"""Figures: one kind a file, from what a run has measured to PDF for LaTeX and SVG for the report.

Which data a figure is drawn of follows from the configuration:

    spectrum, utilization   the analysis (.npz) of every variant of `config.analyses(name)`
    filters                 the folder of the model
    sweep                   the JSON of every cell of `config.measurements(figure.benchmark)`
    quality, state          the frame of every table that it names

An analysis that a partial run does not have is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from reproduction.config import Config
from reproduction.reporting.figures.filters import draw_filters
from reproduction.reporting.figures.quality import draw_quality
from reproduction.reporting.figures.rank import draw_spectrum, draw_utilization
from reproduction.reporting.figures.state import draw_state
from reproduction.reporting.figures.sweep import draw_sweep
from reproduction.reporting.style import drawing, save
from statecut.errors import InputError, nearest

KINDS: dict[str, Callable[[Config, Any, Sequence[Any]], Figure]] = {
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
    """Draw a figure of the configuration, and write it in the form that each file's ending says."""
    if name not in config.figures:
        raise InputError(f"{name!r} is no figure of {config.run}{nearest(name, config.figures)}")
    figure = config.figures[name]
    if config.partial is None and None in sources:
        raise InputError(f"figure {name}: sources are missing, and the run is not `partial`")
    paths = [source and Path(source) for source in sources]
    with drawing():
        save(KINDS[figure.kind](config, name, paths), outs)
