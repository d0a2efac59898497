"""The convolution filters of a model: every weight a pixel, heads side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from reproduction.analysis.filters import filters
from reproduction.config import Config
from reproduction.reporting.style import PAGE, new_figure

SIDES = {"q": "Queries", "k": "Keys", "v": "Values"}
# Few shades: a page holds the pixels of every layer.
SHADES = colormaps["PuOr"].resampled(25)
LINES = "#333333"  # on the pixels, which are light on any page


def draw_filters(config: Config, name: str, sources: Sequence[Path]) -> Figure:
    """Queries, keys and values below each other: channels across, layers and their taps down."""
    from statecut.models.checkpoint import Checkpoint  # loads torch, which no other figure needs

    model = filters(Checkpoint(sources[0]))
    weights = {side: getattr(model, side) for side in SIDES}
    limit = max(float(np.quantile(np.abs(w), 0.995)) for w in weights.values())
    layers, taps = len(model.layers), weights["q"].shape[-1]
    figure = new_figure(PAGE, 0.5 + 3 * max(0.9, 0.017 * layers * taps))
    panels = figure.subplots(3, 1)
    for axes, (side, title) in zip(panels, SIDES.items(), strict=True):
        w = weights[side]  # (layers, heads, channels, W)
        heads = w.shape[1]
        image = axes.imshow(
            pixels(w), aspect="auto", interpolation="none", cmap=SHADES, vmin=-limit, vmax=limit,
            extent=(0, heads, layers, 0),
        )  # fmt: skip
        axes.vlines(np.arange(1, heads), 0, layers, colors=LINES, linewidth=0.7)
        if layers <= 8:  # of more, lines would cover the taps
            axes.hlines(np.arange(1, layers), 0, heads, colors=LINES, linewidth=0.15)
        axes.grid(False)
        axes.set_title(title)
        axes.set_xticks(np.arange(heads) + 0.5, [str(head) for head in range(heads)])
        shown = range(0, layers, max(1, layers // 6))
        axes.set_yticks([i + 0.5 for i in shown], [str(model.layers[i]) for i in shown])
        axes.set_ylabel("layer")
        axes.tick_params(length=0)
    panels[-1].set_xlabel("head" if heads > 1 else "one filter for all heads")
    bar = figure.colorbar(image, ax=list(panels), shrink=0.5, aspect=25, extend="both")
    bar.set_label("weight")
    bar.outline.set_linewidth(0.3)
    return figure


def pixels(w: np.ndarray) -> np.ndarray:
    """(layers * W, heads * channels) of filters (layers, heads, channels, W)."""
    layers, heads, channels, taps = w.shape
    return w.transpose(0, 3, 1, 2).reshape(layers * taps, heads * channels)
