"""Spectra of one head's states, and how much of their memory all heads use over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from reproduction.analysis.rank import RankAnalysis
from reproduction.config import Config, SpectrumFigure, Stage, UtilizationFigure
from reproduction.reporting.grid import STAGES
from reproduction.reporting.style import COLUMN, PAGE, colour, dash, label, name_curves, new_figure

BINS = 60
DECADES = 4  # below the largest singular value; smaller ones are only counted

Analyses = dict[tuple[str, Stage], list[RankAnalysis]]
"""By method and stage, baseline first: one analysis per seed."""


def read_analyses(config: Config, name: str, sources: Sequence[Path | None]) -> Analyses:
    """Those that a partial run has."""
    analyses: Analyses = {}
    for variant, path in zip(config.analyses(name), sources, strict=True):
        if path is not None:
            analyses.setdefault((variant.method, variant.rft), []).append(RankAnalysis.load(path))
    return analyses


def name_curve(config: Config, method: str, stage: Stage) -> str:
    name = label(config, method)
    return name if stage in ("none", "pre") else f"{name}, {STAGES[stage]}"


def missing_note(config: Config, name: str, sources: Sequence[Path | None]) -> str:
    """A line that names what a partial run does not have; empty if nothing is missing."""
    seeds: dict[str, list[bool]] = {}  # whether each of them was measured
    for variant, path in zip(config.analyses(name), sources, strict=True):
        seeds.setdefault(name_curve(config, variant.method, variant.rft), []).append(bool(path))
    absent = [
        f"{name} ({measured.count(False)} of {len(measured)} seeds)"
        for name, measured in seeds.items()
        if not all(measured)
    ]
    return "\n" + fill("not measured: " + "; ".join(absent), 44) if absent else ""


def draw_spectrum(config: Config, name: str, sources: Sequence[Path | None]) -> Figure:
    """Histograms side by side: how many singular values of a state lie where, on average."""
    spec = config.figures[name]
    assert isinstance(spec, SpectrumFigure)
    spectra = {  # (states, d): singular values of the head, of all its states and seeds
        key: np.concatenate(
            [a.spectrum(spec.layer, spec.head)[: spec.tokens - a.skip] for a in seeds]
        )
        for key, seeds in read_analyses(config, name, sources).items()
    }
    edges = bins(list(spectra.values()))
    figure = new_figure(min(PAGE, COLUMN * len(spectra) / 2 + 0.5), 1.9)
    panels = np.atleast_1d(figure.subplots(1, len(spectra), sharex=True, sharey=True))
    for axes, ((method, stage), sigma) in zip(panels, spectra.items(), strict=True):
        counts, _ = np.histogram(sigma, edges)
        squares = np.square(sigma[sigma[:, 0] > 0], dtype=np.float64)  # without zero states
        utilization = np.mean(squares.sum(1) / squares[:, 0]) / sigma.shape[1]
        shade = colour(config, method)
        axes.stairs(counts / len(sigma), edges, fill=True, color=shade, alpha=0.35)
        axes.stairs(counts / len(sigma), edges, color=shade, linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, numticks=DECADES + 2))
        axes.minorticks_off()
        axes.set_title(name_curve(config, method, stage), color=shade, pad=14)
        axes.text(
            0, 1.03, f"$d$ = {sigma.shape[1]},  $u$ = {utilization:.2f}",
            transform=axes.transAxes, fontsize=7,
        )  # fmt: skip
        if below := (sigma < edges[0]).sum() / len(sigma):
            axes.text(0.02, 0.9, f"← {below:.1f} below", transform=axes.transAxes, fontsize=7)
    panels[0].set_ylim(0, 1.2 * panels[0].get_ylim()[1])  # room for the number of those below
    panels[0].set_ylabel("number per state")
    figure.supxlabel("singular value" + missing_note(config, name, sources), fontsize=8)
    return figure


def bins(spectra: Sequence[np.ndarray]) -> np.ndarray:
    """Edges from the smallest singular value, or DECADES below the largest, to the largest."""
    positive = np.concatenate([sigma[sigma > 0] for sigma in spectra])
    largest = float(positive.max())
    edges = np.geomspace(max(largest / 10**DECADES, float(positive.min())), largest, BINS + 1)
    edges[-1] = largest  # which rounding may have left outside
    return edges


def draw_utilization(config: Config, name: str, sources: Sequence[Path | None]) -> Figure:
    """One curve per variant: u(S_t), mean over layers and heads; a band where seeds differ."""
    spec = config.figures[name]
    assert isinstance(spec, UtilizationFigure)
    figure = new_figure(COLUMN + 0.7, 2.3)
    axes = figure.subplots()
    t = np.arange(1, spec.tokens + 1)
    for (method, stage), analyses in read_analyses(config, name, sources).items():
        # (seeds, T)
        used = np.stack([a.utilization[..., : spec.tokens].mean((0, 1)) for a in analyses])
        look: Any = {"color": colour(config, method), "linestyle": dash(config, method)}
        text = f"{name_curve(config, method, stage)} ({analyses[0].capacity})"
        axes.plot(t, used.mean(0), label=text, **look)
        if len(used) > 1:
            axes.fill_between(t, used.min(0), used.max(0), color=look["color"], alpha=0.2, lw=0)
    axes.set_xlim(1, spec.tokens)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("token $t$" + missing_note(config, name, sources))
    axes.set_ylabel("rank utilization $u(S_t)$")
    axes.set_title("capacity $d$ in brackets", loc="right", fontsize=7)
    name_curves(figure, axes)
    return figure
