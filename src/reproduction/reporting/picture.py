"""The picture that a report begins with: perplexity against the state of a sequence.

A panel per model, small enough for a phone; the state shrinks to the right, where curves have their
names. Unlike a figure of kind `state` it has one method, and numbers of all tables of a run.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from reproduction.config import BASELINE, Stage, state_bytes
from reproduction.reporting import style
from reproduction.reporting.headline import Headline, format_bytes

TOP = 6  # times the whole model's perplexity; what is above leaves the picture
CURVES: dict[Stage, tuple[str, str, str]] = {  # their names, colours and meanings
    "pre": ("sliced", "#7d7a80", "Sliced: channels are removed, and nothing else."),
    "refit": (
        "refitted",
        "#2c78fd",
        "Refitted, Statecut’s way: the matrices behind them are fitted to what is left, without "
        "training.",
    ),
    "post": ("recovered", "#d37e17", "Recovered, the paper’s way: trained again for a while."),
    "refit_post": ("both", "#8a5cc9", "Both: refitted, then recovered."),
}
OVER_SEEDS = "Bars are one standard deviation over seeds."


def draw_headline(headline: Headline) -> dict[str, str]:
    """An SVG for every model that has a curve."""
    models = [m for m in headline.models if any(headline.points(m, stage) for stage in CURVES)]
    width = style.COLUMN if len(models) <= 2 else 0.8 * style.COLUMN
    with style.drawing():
        return {model: _draw(headline, model, width) for model in models}


def describe_headline(headline: Headline) -> str:
    """The caption, with the stages that are drawn."""
    label = headline.label(headline.method)
    texts = [
        f"Perplexity on {headline.task} against the state that a sequence needs, cut by {label}: "
        f"{headline.chosen_by}."
    ]
    bars = False
    for stage, (_, _, meaning) in CURVES.items():
        points = [point for model in headline.models for point in headline.points(model, stage)]
        texts += [meaning] if points else []
        bars |= any(spread for _, _, spread in points)
    return " ".join(texts + [OVER_SEEDS] * bars)


def _draw(headline: Headline, model: str, width: float) -> str:
    curves = {stage: points for stage in CURVES if (points := headline.points(model, stage))}
    ratios = sorted({ratio for points in curves.values() for ratio, *_ in points})
    sizes = {ratio: state_bytes(headline.config.models[model], ratio) for ratio in ratios}
    figure, ends = style.new_figure(width, 1.9), []
    axes = figure.subplots()
    for stage, points in curves.items():
        name, colour, _ = CURVES[stage]
        cut, y, bars = zip(*points, strict=True)
        x = [sizes[ratio] for ratio in cut]
        axes.errorbar(
            x, y, yerr=bars, color=colour, marker="o", markersize=3.5, elinewidth=0.8,
            linewidth=2.2 if stage == "refit" else 1.3,
            linestyle=style.SOLID if len(points) > 2 else "none",  # or it would pass a size by
        )  # fmt: skip
        if cut[-1] == ratios[-1]:
            ends.append((y[-1], name, colour))
        else:
            axes.annotate(
                name, (x[-1], y[-1]), (6, -1), textcoords="offset points", va="center",
                color=colour,
            )  # fmt: skip
    whole = headline.whole(model)
    if whole and whole.value is not None:
        shown = style.dash(headline.config, BASELINE)
        axes.axhline(whole.value, color=style.INK, linestyle=shown, linewidth=1)
        axes.plot(sizes[0.0], whole.value, "o", color=style.INK, markersize=3.5, zorder=3)
        ends.append((whole.value, "whole", style.INK))
        values = [value for points in curves.values() for _, value, _ in points]
        low, high = min(values), min(max(values), TOP * whole.value)
        margin = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)
    axes.set_title(headline.label(model))
    axes.set_ylabel(f"perplexity, {headline.task}")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    _label_sizes(axes, sizes)
    top = axes.get_ylim()[1]
    style.name_ends(axes, [(min(height, top), name, colour) for height, name, colour in ends])
    return style.to_svg(figure)


def _label_sizes(axes: Axes, sizes: dict[float, int]) -> None:
    """Those of the whole model, the half and the last: there is no room for more."""
    texts = dict.fromkeys(sizes, "")
    for ratio in {0.0, 0.5, max(sizes)} & {*sizes}:
        part = f"{100 * ratio:g} % cut" if ratio else "whole"
        texts[ratio] = f"{format_bytes(sizes[ratio])}\n{part}"
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.minorticks_off()
    axes.xaxis.set_major_locator(FixedLocator(list(sizes.values())))
    axes.xaxis.set_major_formatter(FixedFormatter(list(texts.values())))
