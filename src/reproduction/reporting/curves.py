"""Loss curves of each model's first training: pretraining in one panel, recovery by model and
ratio, with the run's own eps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from reproduction.config import BASELINE, Config, Variant
from reproduction.reporting import style
from reproduction.reporting.grid import percent

POINTS = 100  # of a curve
DASHES = ("-", (0, (4, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1, 1.5)))  # for models of one kernel


def draw_curves(config: Config, curves: Mapping[Variant, Path | str]) -> dict[str, str]:
    """SVGs of `pretraining` and `recovery`, as far as there are curves."""
    points = {
        variant: read_curve(path)
        for variant, path in curves.items()
        if Path(path).is_file() and not config.models[variant.model].training
    }
    trained = {variant.model: curve for variant, curve in points.items() if variant.rft == "none"}
    recovered = {
        variant: curve
        for variant, curve in points.items()
        if variant.recovered and (not variant.pruned or variant.eps == config.eps)
    }
    figures = {}
    with style.drawing():
        if trained:
            figures["pretraining"] = style.to_svg(_pretraining(config, trained))
        if recovered:
            figures["recovery"] = style.to_svg(_recovery(config, recovered))
    return figures


def read_curve(path: Path | str) -> np.ndarray:
    """(points, 2): million tokens and cross-entropy, each the mean of neighbouring steps.

    Steps without a finite loss, which training skipped, are left out.
    """
    table = pd.read_csv(path)
    steps = table.loc[np.isfinite(table["ce"]), ["tokens", "ce"]].to_numpy(np.float64)
    parts = np.array_split(steps, min(POINTS, len(steps)))
    return np.stack([part.mean(0) for part in parts]) / (1e6, 1)


def _pretraining(config: Config, trained: Mapping[str, np.ndarray]) -> Figure:
    figure = style.new_figure(style.PAGE, 2.4)
    axes = figure.subplots()
    dashes = {kernel: cycle(DASHES) for kernel in style.KERNELS}
    for name, curve in trained.items():
        model = config.models[name]
        shade, dash = style.KERNELS[model.kernel], next(dashes[model.kernel])
        axes.plot(*curve.T, color=shade, linestyle=dash, label=model.label)
    axes.set_ylabel("cross-entropy")
    axes.set_xlabel("million tokens")
    style.name_curves(figure, axes)
    return figure


def _recovery(config: Config, recovered: Mapping[Variant, np.ndarray]) -> Figure:
    """Models down, ratios across; seeds averaged, and the recovered baseline in every panel."""
    models = list(dict.fromkeys(variant.model for variant in recovered))
    ratios = sorted({v.ratio for v in recovered if v.pruned}, key=str) or [0.0]
    figure = style.new_figure(style.PAGE, 0.5 + 1.5 * len(models))
    panels = figure.subplots(len(models), len(ratios), sharex=True, sharey="row", squeeze=False)
    lines = {}  # by name
    for (i, model), (j, ratio) in product(enumerate(models), enumerate(ratios)):
        axes = panels[i, j]
        cut = percent(ratio) if isinstance(ratio, str) else f"{100 * ratio:g} % cut"
        axes.set_title(cut if i == 0 else "")
        axes.set_ylabel(f"{config.models[model].label}\ncross-entropy" if j == 0 else "")
        axes.set_xlabel("million tokens" if i == len(models) - 1 else "")
        curves: dict[tuple[str, bool], list[np.ndarray]] = {}
        for variant, curve in recovered.items():
            if variant.model == model and variant.ratio in (ratio, 0.0):
                curves.setdefault((variant.method, variant.refitted), []).append(curve)
        for (method, refitted), seeds in curves.items():
            name = style.label(config, method) + ", refitted" * refitted
            look = {"color": style.colour(config, method), "linestyle": style.dash(config, method)}
            # An incomplete run may have fewer points than the others.
            mean = np.mean([curve for curve in seeds if len(curve) == len(seeds[0])], 0)
            alpha = 0.5 if refitted else None
            [lines[name]] = axes.plot(*mean.T, linewidth=1, alpha=alpha, label=name, **look)
    first = style.label(config, BASELINE)
    handles = [lines[name] for name in sorted(lines, key=lambda name: name != first)]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=7)
    return figure
