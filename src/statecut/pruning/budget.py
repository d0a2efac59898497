"""Splits: widths of keys and values that leave at most a share of a model's recurrent state.

The state of a head has d_v x d_k numbers, so the same share can be had by fewer keys, by fewer
values, or by some of both. Which costs least is for a comparison to say: `statecut prune --state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from statecut.errors import InputError
from statecut.models.checkpoint import Checkpoint
from statecut.models.shapes import WIDEST, MixerShape
from statecut.pruning.slicing import can_express, check_widths
from statecut.serving.engines import Engine

STEPS = (16, 8, 4, 2, 1)
"""Widths are multiples of the first, which kernels compute fastest, if there are enough of them."""
CLOSE = Fraction(3, 4)  # of the budget: splits that leave less are taken if there are no others
MOST = 5


@dataclass(frozen=True)
class Split:
    width: int  # d_k
    value_width: int  # d_v

    def __str__(self) -> str:
        return f"{self.width} x {self.value_width}"

    def options(self) -> str:
        """Of the command line."""
        return f"--keys {self.width} --values {self.value_width}"

    @property
    def size(self) -> int:
        return self.width * self.value_width

    def within(self, other: Split) -> bool:
        """Whether it is another one, and has no more of keys nor of values."""
        mine, theirs = (self.width, self.value_width), (other.width, other.value_width)
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


def whole(shape: MixerShape) -> Split:
    return Split(shape.width, shape.value_width)


def splits_within(
    checkpoint: Checkpoint, share: float, engine: Engine | None, steps: Sequence[int] = STEPS
) -> tuple[int, list[Split]]:
    """A few splits that leave at most `share` of the state, from few keys to few values, and the
    multiple that their widths are; a width that is not cut stays as it is. None if there are none.

    Of splits within one another the largest is taken. Multiples are those of the first step that
    has two splits close to the budget, so that there is something to compare; or else one.
    """
    budget = Fraction(str(share)) * whole(checkpoint.shape).size
    for least, enough in ((CLOSE * budget, 2), (CLOSE * budget, 1), (0, 1)):
        for step in steps:
            splits = _largest(checkpoint, budget, engine, step)
            splits = [split for split in splits if split.size >= least]
            if len(splits) >= enough:
                return step, _spread(splits)
    return steps[-1], []


def check_split(checkpoint: Checkpoint, split: Split, engine: Engine | None) -> None:
    """An error if a model cannot be cut to widths that were given by hand."""
    full = whole(checkpoint.shape)
    for name, width, limit, channels in (
        ("--keys", split.width, full.width, "key"),
        ("--values", split.value_width, full.value_width, "value"),
    ):
        if width > limit:
            raise InputError(
                f"{name} {width}: a head of {checkpoint.folder} has {limit} {channels} channels; "
                f"give 1 to {limit}"
            )
    if split == full:
        raise InputError(
            f"d_k {full.width} and d_v {full.value_width} are all that a head of "
            f"{checkpoint.folder} has: give fewer --keys or --values"
        )
    if split.width > WIDEST:
        raise InputError(
            f"{split.width} key channels a head: the kernels take no more than {WIDEST}; give "
            "fewer --keys"
        )
    if engine and not engine.takes(split.width, split.value_width):
        raise InputError(
            f"--for {engine.name}: {engine.label} does not take d_k {split.width} with d_v "
            f"{split.value_width}; it takes {engine.widths()}: give --keys and --values that fit"
        )
    check_widths(checkpoint, split.width, split.value_width)


def _largest(
    checkpoint: Checkpoint, budget: Fraction, engine: Engine | None, step: int
) -> list[Split]:
    """All splits on a grid whose size is at most that, without those within others."""
    splits = [split for split in _usable(checkpoint, engine, step) if split.size <= budget]
    best = {split.width: split for split in splits}  # values ascend
    return [s for s in best.values() if not any(s.within(other) for other in best.values())]


def _usable(checkpoint: Checkpoint, engine: Engine | None, step: int) -> Iterator[Split]:
    """Those of a grid that the config can express, and kernels and the engine compute."""
    shape = checkpoint.shape
    for width in _grid(min(shape.width, WIDEST), shape.width, step):
        for value_width in _grid(shape.value_width, shape.value_width, step):
            taken = engine is None or engine.takes(width, value_width)
            if taken and can_express(checkpoint, width, value_width):
                yield Split(width, value_width)


def _grid(widest: int, full: int, step: int) -> list[int]:
    """Multiples, and all channels."""
    return [width for width in (*range(step, full, step), full) if width <= widest]


def _spread(splits: list[Split]) -> list[Split]:
    """A few of many, evenly by the logarithm of d_k; the first and the last among them."""
    if len(splits) <= MOST:
        return splits
    first, last = math.log(splits[0].width), math.log(splits[-1].width)
    chosen = []
    for i in range(MOST):
        place = first + (last - first) * i / (MOST - 1)
        distances = {abs(math.log(split.width) - place): split for split in splits}
        chosen.append(distances[min(distances)])
    return list(dict.fromkeys(chosen))


def no_split(
    checkpoint: Checkpoint, share: float, engine: Engine | None, steps: Sequence[int]
) -> InputError:
    """The error if there is none, with the smallest that there is."""
    step = steps[-1]
    full = whole(checkpoint.shape)
    limits = [
        f"that {engine.label} takes ({engine.widths()})" if engine else "",
        f"in multiples of {step}" if step > 1 else "",
    ]
    message = " ".join(filter(None, [
        f"--state {share:g}: no split of d_k {full.width} and d_v {full.value_width} of "
        f"{checkpoint.folder}", *limits, "leaves so little of the state",
    ]))  # fmt: skip
    smaller = [s for s in _usable(checkpoint, engine, step) if s != full]
    if not smaller:
        return InputError(f"{message}, nor is there any other cut")
    least = min(smaller, key=lambda split: split.size)
    share = math.ceil(least.size / full.size * 10_000) / 10_000
    return InputError(f"{message}; the smallest is {least}: give --state {share:g} or more")
