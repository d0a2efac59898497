"""Throughput against head width, of the mixers of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from keycut.config import Config, Measurement, MixerBenchmark, SweepFigure
from keycut.reporting.frame import Result, check_count, read_measurement, timing_key
from keycut.reporting.style import COLUMN, KERNELS, PAGE, SOLID, Dash, name_ends, new_figure

PASSES = {"forward": "Forward", "training": "Forward and backward"}
GATED: dict[bool, Dash] = {False: SOLID, True: (0, (4, 1.5))}


def draw_sweep(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """One panel per pass, one curve per mixer; a cross where a width could not be measured."""
    spec = config.figures[name]
    assert isinstance(spec, SweepFigure)
    benchmark = config.benchmarks[spec.benchmark]
    assert isinstance(benchmark, MixerBenchmark)
    measured = read_speeds(config, spec.benchmark, sources)
    figure = new_figure(PAGE if len(benchmark.passes) > 1 else COLUMN + 0.9, 2.3)
    panels = np.atleast_1d(figure.subplots(1, len(benchmark.passes), sharex=True))
    for axes, does in zip(panels, benchmark.passes, strict=True):
        ends = []
        for subject, mixer in benchmark.mixers.items():
            shade = KERNELS[mixer.architecture]
            widths, speeds, errors, missing = curve(measured, subject, does)
            if missing:
                axes.plot(missing, [0] * len(missing), "x", color=shade, clip_on=False)
            axes.errorbar(
                widths, speeds, yerr=2 * np.array(errors), color=shade, marker="o", markersize=3,
                elinewidth=0.8, linestyle=GATED[mixer.use_gate],
            )  # fmt: skip
            ends.append((speeds[-1] if speeds else 0.0, mixer.label, shade))
        axes.set_title(PASSES[does])
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, max(benchmark.widths) * 1.02)
        axes.set_xticks(ticks(benchmark.widths))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("head width $d_k$")
    panels[0].set_ylabel("tokens per second")
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr] # place for the names
    name_ends(panels[-1], ends)
    return figure


def curve(
    measured: Mapping[Measurement, Result], subject: str, does: str
) -> tuple[list[int], list[float], list[float], list[int]]:
    """Widths, throughputs and their errors, and the widths that have none."""
    here = sorted(
        (cell.width, result)
        for cell, result in measured.items()
        if (cell.subject, cell.does) == (subject, does)
    )
    known = [(width, one.value, one.stderr or 0.0) for width, one in here if one.value is not None]
    missing = [width for width, one in here if one.value is None]
    return [k[0] for k in known], [k[1] for k in known], [k[2] for k in known], missing


def read_speeds(
    config: Config, benchmark: str, sources: Sequence[Path]
) -> dict[Measurement, Result]:
    cells = config.measurements(benchmark)
    check_count(f"a sweep of {benchmark}", "measurements", len(cells), len(sources))
    found = {}
    for cell, path in zip(cells, sources, strict=True):
        by_key = {result.key: result for result in read_measurement(config, cell, path)}
        found[cell] = by_key[timing_key(config, cell, "tokens_per_s")]
    return found


def ticks(widths: Sequence[int]) -> list[int]:
    """Widths that have room below the axis: the largest, and those far enough from the last."""
    shown: list[int] = []
    for width in sorted(widths, reverse=True):
        if not shown or shown[-1] - width >= max(widths) / 10:
            shown.append(width)
    return shown
