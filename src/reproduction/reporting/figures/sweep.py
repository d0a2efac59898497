"""Throughput against head width, of the mixers of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from reproduction.config import Config, MixerBenchmark, SweepFigure
from reproduction.reporting.frame import read_measurement, timing_key
from reproduction.reporting.style import COLUMN, KERNELS, PAGE, SOLID, Dash, name_curves, new_figure

PASSES = {"forward": "Forward", "training": "Forward and backward"}
GATED: dict[bool, Dash] = {False: SOLID, True: (0, (4, 1.5))}


def draw_sweep(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """One panel per pass, one curve per mixer; a cross where a width could not be measured."""
    spec = config.figures[name]
    assert isinstance(spec, SweepFigure)
    benchmark = config.benchmarks[spec.benchmark]
    assert isinstance(benchmark, MixerBenchmark)
    speeds = {}
    for cell, path in zip(config.measurements(spec.benchmark), sources, strict=True):
        results = {result.key: result for result in read_measurement(config, cell, path)}
        speeds[cell] = results[timing_key(config, cell, "tokens_per_s")]
    figure = new_figure(PAGE if len(benchmark.passes) > 1 else COLUMN + 0.9, 2.3)
    panels = np.atleast_1d(figure.subplots(1, len(benchmark.passes), sharex=True))
    for axes, mode in zip(panels, benchmark.passes, strict=True):
        for subject, mixer in benchmark.mixers.items():
            shade = KERNELS[mixer.architecture]
            points = [
                (cell.width, result.value, result.stderr or 0.0)
                for cell, result in sorted(speeds.items(), key=lambda item: item[0].width)
                if (cell.subject, cell.mode) == (subject, mode)
            ]
            missing = [width for width, value, _ in points if value is None]
            if missing:
                axes.plot(missing, [0] * len(missing), "x", color=shade, clip_on=False)
            known = np.array([p for p in points if p[1] is not None], float).reshape(-1, 3)
            look = {"color": shade, "linestyle": GATED[mixer.use_gate]}
            axes.plot(known[:, 0], known[:, 1], label=mixer.label, marker="o", markersize=3, **look)
            axes.errorbar(known[:, 0], known[:, 1], yerr=2 * known[:, 2], fmt="none", ecolor=shade)
        axes.set_title(PASSES[mode])
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, max(benchmark.widths) * 1.02)
        axes.set_xticks(ticks(benchmark.widths))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("head width $d_k$")
    panels[0].set_ylabel("tokens per second")
    name_curves(figure, panels[-1])
    return figure


def ticks(widths: Sequence[int]) -> list[int]:
    """The largest width, and smaller ones whose labels do not overlap."""
    shown: list[int] = []
    for width in sorted(widths, reverse=True):
        if not shown or shown[-1] - width >= max(widths) / 10:
            shown.append(width)
    return shown
