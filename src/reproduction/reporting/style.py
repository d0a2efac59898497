"""The style of figures: one colour and dash per method, for white and for dark pages.

INK becomes `currentColor` in an SVG, so that lines and letters take the colour of the text around
them; the background is transparent. All other colours have a contrast of 3 or more on white and on
a dark page, and the colour-blind can tell those of the paper's five methods apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reproduction.config import BASELINE, Config
from statecut.files import atomic_write

INK = "#010203"  # no other part of a figure has this colour
COLUMN = 3.3  # inches: the column of a paper
PAGE = 6.8

Dash = tuple[float, tuple[float, ...]]
SOLID: Dash = (0, ())

# Architectures of a benchmark, which has no methods.
KERNELS = {"delta_net": "#c2455a", "gated_deltanet": "#2f93a8", "kda": "#7a6bc4"}

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same on all machines
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 7),
    "axes.titlelocation": "left",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text stays text: smaller, and searchable
    "svg.hashsalt": "statecut",  # ids are random without it
    "pdf.fonttype": 42,
    "path.simplify_threshold": 0.3,
}
# Without dates and versions.
METADATA: Any = {
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".png": {"Software": None},
}


@contextmanager
def drawing() -> Iterator[None]:
    """The style of our figures, whatever the settings of the machine are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, outs: Iterable[Path | str]) -> None:
    """A figure in the format of each file's ending, the same bytes every time."""
    for out in map(Path, outs):
        with atomic_write(out, force=True) as aside:
            if out.suffix == ".svg":
                aside.write_text(to_svg(figure))
            else:
                figure.savefig(aside, metadata=METADATA[out.suffix], dpi=200)


def to_svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata=METADATA[".svg"])

    def two_digits(path: re.Match[str]) -> str:
        """A hundredth of a point is exact enough for a line, and half of the bytes."""
        return re.sub(r"(\.\d\d)\d+", r"\1", path[0])

    return re.sub(r' d="[^"]+"', two_digits, written.getvalue()).replace(INK, "currentColor")


def colour(config: Config, method: str) -> str:
    return INK if method == BASELINE else config.methods[method].colour


def dash(config: Config, method: str) -> Dash:
    return (0, (1, 1) if method == BASELINE else config.methods[method].dash)


def bars(config: Config) -> str:
    """What the bars of a figure are; empty if it can have none."""
    over = ["seeds"] * (len(config.seeds) > 1)
    over += ["trainings"] * any(model.training for model in config.models.values())
    return f"Bars are one standard deviation over {' or '.join(over)}." if over else ""


def label(config: Config, method: str) -> str:
    return "Baseline" if method == BASELINE else config.methods[method].label


def name_curves(figure: Figure, axes: Axes) -> None:
    """The names of curves, beside the axes, in the order of their last points from the top."""
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    lines.sort(key=lambda line: -np.append(0, line.get_ydata())[-1])
    figure.legend(handles=lines, loc="outside right center", frameon=False, fontsize=7)
