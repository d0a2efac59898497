"""Tables as heat maps: how much better or worse each number is than the one it is held to.

A run that compares with the paper cell by cell is held to the paper's numbers, and what is inside
its tolerance has no colour. Any other run is held to its own unpruned model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keycut.config import BASELINE, Config
from keycut.reporting.frame import Cell, Key
from keycut.reporting.grid import lower_is_better
from keycut.reporting.verdict import OUTSIDE, Line

STEPS = (0.01, 0.03, 0.1, 0.3)
"""Relative differences from which on a colour is stronger."""

# Of timings, which no suite has.
LESS_IS_BETTER = ("peak_memory_gib", "memory_ratio", "state_mib")


@dataclass(frozen=True)
class Look:
    """What a page shows of a number beside itself."""

    place: int  # of its key in the page's data
    shade: str  # better-1 .. better-4, worse-1 .. worse-4, or nothing
    theirs: str  # what it is held to
    change: str
    outside: bool = False
    errata: str = ""


def against_paper(config: Config, place: int, line: Line, theirs: str) -> Look:
    """The look of one of the paper's numbers; `theirs` is how a table prints it."""
    if line.difference is None or line.ours is None:
        return Look(place, "", theirs, "", errata=line.errata)
    assert line.tolerance is not None
    inside = abs(line.difference) <= line.tolerance * (1 + 1e-9)
    shade = "" if inside else shaded(config, line.key, line.ours, line.paper)
    outside = line.word in OUTSIDE
    return Look(place, shade, theirs, f"{line.difference:+.3g}", outside, line.errata)


def against_baseline(
    config: Config, place: int, key: Key, cells: Mapping[Key, Cell], texts: Mapping[Key, str]
) -> Look:
    """The look of a number beside the unpruned model's in the same table."""
    held_to = reference(key, cells)
    if held_to is None or key == held_to:
        return Look(place, "", "", "")
    ours, theirs = cells[key].value, cells[held_to].value
    if ours is None or not theirs:
        return Look(place, "", texts.get(held_to, ""), "")
    shade = shaded(config, key, ours, theirs)
    return Look(place, shade, texts.get(held_to, ""), relative(ours / theirs))


def reference(key: Key, cells: Mapping[Key, Cell]) -> Key | None:
    """The unpruned model's number; for an unpruned model itself, one with separate filters."""
    whole = [
        other
        for other in cells
        if (other.metric, other.method, other.rft) == (key.metric, BASELINE, "none")
    ]
    same = [w for w in whole if (w.model, w.conv_sharing) == (key.model, key.conv_sharing)]
    if key not in same:
        return next(iter(same), None)
    separate = [w for w in whole if w.conv_sharing == "none" and key.conv_sharing != "none"]
    return next(iter(sorted(separate, key=lambda w: w.model != key.model)), None)


def shaded(config: Config, key: Key, ours: float, theirs: float) -> str:
    """Better or worse, and how strong."""
    if not theirs or ours == theirs:
        return ""
    change = ours / theirs - 1
    strength = sum(abs(change) >= step for step in STEPS)
    if not strength:
        return ""
    return f"{'better' if (change < 0) == lower(config, key) else 'worse'}-{strength}"


def lower(config: Config, key: Key) -> bool:
    if key.head_k_dim is not None:
        return key.metric.endswith(LESS_IS_BETTER)
    return lower_is_better(config, key.metric)


def relative(ratio: float) -> str:
    if ratio >= 10:
        return f"×{ratio:.3g}"
    return f"{100 * (ratio - 1):+.1f} %"
