"""Widths of keys and values that leave at most a share of a model's recurrent state.

The state of a head has d_v x d_k numbers, so the same share can be had by fewer keys, by fewer
values, or by some of both. Which costs least is for a comparison to say: `statecut prune --state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from statecut.arguments import STEPS
from statecut.errors import InputError
from statecut.models.description import Description
from statecut.models.shapes import WIDEST, MixerShape
from statecut.serving.engines import Engine

CLOSE = Fraction(3, 4)  # of the budget: cuts that leave less are taken if there are no others
MOST = 5
SHARES = (0.5, 0.25, 0.125)  # that `statecut inspect` shows


def in_words(shape: MixerShape) -> str:
    return f"{shape.width} x {shape.value_width}"


def cuts_within(
    model: Description, share: float, engine: Engine | None, steps: Sequence[int] = STEPS
) -> tuple[int, list[MixerShape]]:
    """A few shapes that leave at most `share` of the state, from few keys to few values, and the
    multiple that their widths are; a width that is not cut stays as it is. None if there are none.

    Of shapes within one another the largest is taken. Multiples are those of the first step that
    has two shapes close to the budget, so that there is something to compare; or else one.
    """
    budget = Fraction(str(share)) * model.shape.state_bytes()
    for least, enough in ((CLOSE * budget, 2), (CLOSE * budget, 1), (0, 1)):
        for step in steps:
            best = {  # values ascend
                s.width: s for s in _usable(model, engine, step) if s.state_bytes() <= budget
            }
            shapes = [
                shape
                for shape in best.values()
                if shape.state_bytes() >= least
                and not any(shape.narrower_than(other) for other in best.values())
            ]
            if len(shapes) >= enough:
                return step, _spread(shapes)
    return steps[-1], []


def wanted_cuts(
    model: Description, share: float, engine: Engine | None, steps: Sequence[int]
) -> tuple[int, list[MixerShape]]:
    """The same, or an error with the smallest cut that there is."""
    step, shapes = cuts_within(model, share, engine, steps)
    if shapes:
        return step, shapes
    full = model.shape
    taken = f" that {engine.label} takes ({engine.widths})" if engine else ""
    multiples = f" in multiples of {step}" if step > 1 else ""
    least = min(_usable(model, engine, step), key=MixerShape.state_bytes, default=full)
    possible = math.ceil(least.state_bytes() / full.state_bytes() * 10_000) / 10_000
    raise InputError(
        f"--state {share:g}: no cut of d_k {full.width} and d_v {full.value_width} of "
        f"{model.place}{taken}{multiples} leaves so little of the state; the smallest is "
        f"{in_words(least)}: give --state {possible:g} or more"
    )


def check_cut(model: Description, cut: MixerShape, engine: Engine | None) -> None:
    """An error if a model cannot be cut to widths that were given by hand."""
    full = model.shape
    if not cut.narrower_than(full):
        raise InputError(
            f"--keys {cut.width} --values {cut.value_width}: a head of {model.place} has "
            f"{full.width} key and {full.value_width} value channels; give fewer of one or both"
        )
    if cut.width > WIDEST:
        raise InputError(f"--keys {cut.width}: the kernels take no more than {WIDEST}; give fewer")
    if engine and not engine.takes(cut.width, cut.value_width):
        raise InputError(
            f"--for {engine.name}: {engine.label} does not take d_k {cut.width} with d_v "
            f"{cut.value_width}; it takes {engine.widths}: give --keys and --values that fit"
            f"{f', or {engine.instead}' if engine.instead else ''}"
        )
    model.resized(cut.width, cut.value_width)


def _usable(model: Description, engine: Engine | None, step: int) -> Iterator[MixerShape]:
    """Shapes with multiples or all channels, that the config can express, and kernels and the
    engine compute."""
    full = model.shape
    for width in (*range(step, full.width, step), full.width):
        for value_width in (*range(step, full.value_width, step), full.value_width):
            cut = replace(full, width=width, value_width=value_width)
            kind = model.architecture.model_type
            taken = width <= WIDEST and (engine is None or engine.serves(kind, cut))
            if taken and model.can_express(cut):
                yield cut


def _spread(shapes: list[MixerShape]) -> list[MixerShape]:
    """A few of many, evenly by the logarithm of d_k; the first and the last among them."""
    if len(shapes) <= MOST:
        return shapes
    first, last = math.log(shapes[0].width), math.log(shapes[-1].width)
    chosen = []
    for i in range(MOST):
        place = first + (last - first) * i / (MOST - 1)
        distances = {abs(math.log(shape.width) - place): shape for shape in shapes}
        chosen.append(distances[min(distances)])
    return list(dict.fromkeys(chosen))


def splits(model: Description, engine: Engine | None = None) -> dict[float, list[tuple[int, int]]]:
    """d_k and d_v of what `--state` compares at some shares."""
    return {
        share: [(shape.width, shape.value_width) for shape in cuts_within(model, share, engine)[1]]
        for share in SHARES
    }
