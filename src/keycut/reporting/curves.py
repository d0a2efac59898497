"""Loss curves of whatever a run trained: pretraining in one panel, recovery by model and ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keycut.config import BASELINE, Config, Variant
from keycut.errors import InputError
from keycut.reporting.style import (
    KERNELS,
    PAGE,
    SOLID,
    Dash,
    colour,
    dash,
    drawing,
    label,
    name_ends,
    new_figure,
    to_svg,
)

POINTS = 100
"""Of a curve that is drawn: each the mean of the steps around it."""

# One per model of a delta rule, in order.
ONE_AFTER_ANOTHER: tuple[Dash, ...] = (
    SOLID, (0, (4, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1, 1.5)),
)  # fmt: skip


def draw_curves(config: Config, curves: Mapping[Variant, Path | str]) -> dict[str, str]:
    """SVGs by what was trained: `pretraining` and `recovery`, as far as there are curves."""
    read = {variant: read_curve(path) for variant, path in curves.items()}
    trained = {variant.model: curve for variant, curve in read.items() if variant.rft == "none"}
    recovered = {variant: curve for variant, curve in read.items() if variant.rft == "post"}
    drawn = {}
    with drawing():
        if trained:
            drawn["pretraining"] = to_svg(_pretraining(config, trained))
        if recovered:
            drawn["recovery"] = to_svg(_recovery(config, recovered))
    return drawn


def read_curve(path: Path | str) -> np.ndarray:
    """(points, 2): tokens and cross-entropy, each the mean of neighbouring steps.

    Steps that were not finite were skipped in training, and are here.
    """
    table = pd.read_csv(path)
    if not {"tokens", "ce"} <= set(table):
        raise InputError(f"{path} is no loss curve: it has columns {', '.join(table)}")
    steps = table.loc[np.isfinite(table["ce"]), ["tokens", "ce"]].to_numpy(np.float64)
    if not len(steps):
        raise InputError(f"{path}: no step of this loss curve has a finite loss")
    parts = np.array_split(steps, min(POINTS, len(steps)))
    return np.stack([part.mean(0) for part in parts])


def _pretraining(config: Config, trained: Mapping[str, np.ndarray]) -> Figure:
    figure = new_figure(PAGE, 2.4)
    axes = figure.subplots()
    ends, seen = [], list[str]()
    for model, curve in trained.items():
        kernel = config.models[model].kernel
        seen.append(kernel)
        style = ONE_AFTER_ANOTHER[(seen.count(kernel) - 1) % len(ONE_AFTER_ANOTHER)]
        axes.plot(*_millions(curve), color=KERNELS[kernel], linestyle=style)
        ends.append((float(curve[-1, 1]), config.models[model].label, KERNELS[kernel]))
    _named(axes, "cross-entropy")
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr] # place for the names
    name_ends(axes, ends)
    return figure


def _recovery(config: Config, recovered: Mapping[Variant, np.ndarray]) -> Figure:
    """Models down, ratios across; seeds averaged, and the recovered baseline in every panel."""
    models = list(dict.fromkeys(variant.model for variant in recovered))
    ratios = sorted({variant.ratio for variant in recovered if variant.pruned}) or [0.0]
    figure = new_figure(PAGE, 0.5 + 1.5 * len(models))
    panels = figure.subplots(len(models), len(ratios), sharex=True, sharey="row", squeeze=False)
    named: dict[str, tuple[str, Dash]] = {}
    for (i, model), (j, ratio) in _pairs(models, ratios):
        axes = panels[i, j]
        axes.set_title(f"{100 * ratio:g} % cut" if i == 0 else "")
        what = f"{config.models[model].label}\ncross-entropy"
        _named(axes, what if j == 0 else "", below=i == len(models) - 1)
        for method, curve in _of_panel(recovered, model, ratio).items():
            named[method] = shade, style = colour(config, method), dash(config, method)
            axes.plot(*_millions(curve), color=shade, linestyle=style, linewidth=1)
    handles = [
        figure.axes[0].plot([], [], color=shade, linestyle=style, label=label(config, method))[0]
        for method, (shade, style) in sorted(named.items(), key=lambda one: one[0] != BASELINE)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=7)
    return figure


def _of_panel(
    recovered: Mapping[Variant, np.ndarray], model: str, ratio: float
) -> dict[str, np.ndarray]:
    """The mean curve of each method; of the baseline only beside others."""
    found: dict[str, list[np.ndarray]] = {}
    for variant, curve in recovered.items():
        if variant.model == model and variant.ratio in (ratio, 0.0):
            found.setdefault(variant.method, []).append(curve)
    if ratio and found.keys() == {BASELINE}:
        return {}
    # A run that was cut off may have fewer points than the others.
    return {
        method: np.mean([curve for curve in curves if len(curve) == len(curves[0])], 0)
        for method, curves in found.items()
    }


def _pairs(
    models: Sequence[str], ratios: Sequence[float]
) -> list[tuple[tuple[int, str], tuple[int, float]]]:
    return [(row, column) for row in enumerate(models) for column in enumerate(ratios)]


def _millions(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return curve[:, 0] / 1e6, curve[:, 1]


def _named(axes: Axes, what: str, *, below: bool = True) -> None:
    axes.set_ylabel(what)
    axes.set_xlabel("million tokens" if below else "")
