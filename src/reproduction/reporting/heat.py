"""Tables as heat maps: how much better or worse a number is than the one it is compared with.

A run that compares with the paper cell by cell is compared with the paper's numbers, without a
colour inside their tolerance. Any other run is compared with its own unpruned model, without a
colour where the difference is within the noise (`reproduction.reporting.claims.differ`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reproduction.config import BASELINE, Config
from reproduction.reporting.claims import differ
from reproduction.reporting.frame import Cell, Key, lower_is_better
from reproduction.reporting.grid import Box
from reproduction.reporting.verdict import OUTSIDE, Judgement, is_inside

STEPS = (0.01, 0.03, 0.1, 0.3)
"""Relative differences at which the colour becomes stronger."""


@dataclass(frozen=True)
class Look:
    """What a page shows of a number in addition to the number."""

    shade: str = ""  # better-1 .. better-4, worse-1 .. worse-4, or empty
    theirs: str = ""  # what it is compared with
    change: str = ""
    outside: bool = False
    errata: str = ""


def against_paper(config: Config, judgement: Judgement, theirs: str) -> Look:
    """The look of one of the paper's numbers; `theirs` is how a table prints it."""
    ours, difference, tolerance = judgement.ours, judgement.difference, judgement.tolerance
    if ours is None or difference is None or tolerance is None:
        return Look(theirs=theirs, errata=judgement.errata)
    shade, outside = "", judgement.word in OUTSIDE
    if not is_inside(difference, tolerance):
        shade = shade_of(config, judgement.key.metric, ours, judgement.paper)
    return Look(shade, theirs, f"{difference:+.3g}", outside, judgement.errata)


def against_baseline(
    config: Config, key: Key, cells: Mapping[Key, Cell], boxes: Mapping[Key, Box]
) -> Look:
    """The look of a number compared with the unpruned model's in the same table."""
    baseline = reference(key, cells)
    if baseline is None or key == baseline:
        return Look()
    ours, theirs, text = cells[key].value, cells[baseline].value, boxes[baseline].text
    if ours is None or not theirs:
        return Look(theirs=text)
    clear = differ(cells[key], cells[baseline])
    shade = shade_of(config, key.metric, ours, theirs) if clear else ""
    return Look(shade, text, format_change(ours / theirs))


def reference(key: Key, cells: Mapping[Key, Cell]) -> Key | None:
    """The unpruned model's number; for an unpruned model itself, one with separate filters."""
    unpruned = [
        other
        for other in cells
        if (other.metric, other.method, other.rft) == (key.metric, BASELINE, "none")
    ]
    same = [k for k in unpruned if (k.model, k.conv_sharing) == (key.model, key.conv_sharing)]
    if key not in same:
        return next(iter(same), None)
    separate = [k for k in unpruned if k.conv_sharing == "none" and key.conv_sharing != "none"]
    return next(iter(sorted(separate, key=lambda k: k.model != key.model)), None)


def shade_of(config: Config, metric: str, ours: float, theirs: float) -> str:
    """Better or worse, and how strong."""
    change = ours / theirs - 1 if theirs else 0.0
    strength = sum(abs(change) >= step for step in STEPS)
    if not strength:
        return ""
    return f"{'better' if (change < 0) == lower_is_better(config, metric) else 'worse'}-{strength}"


def format_change(ratio: float) -> str:
    if ratio >= 100:
        return f"×{ratio:,.0f}"
    if ratio >= 10:
        return f"×{ratio:.1f}"
    return f"{100 * (ratio - 1):+.1f} %"
