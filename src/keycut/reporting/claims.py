"""The paper's claims, held to the numbers that decide them (config/claims.yaml).

A claim is a comparison made wherever a run has the cells for it, so that a small run can answer it
too. One comparison is true or false if the difference is larger than 2 sqrt(spread² + spread² +
error²), and open otherwise, or where a number is missing: the spreads over seeds, and the error
that the draw of documents makes of the difference itself. Numbers of the same documents rise and
fall together, so it is far smaller than their own errors. A claim holds if its `share` of
comparisons is true, fails if more than the rest are false, and is not decided else. What was drawn
once or twice has no spread, or a poor one: how many comparisons rest on that is said beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import Field, PositiveFloat, TypeAdapter, ValidationError

from keycut.config import BASELINE, Config
from keycut.config.section import WHICH, Fractional, Many, Name, Section, Some, Target
from keycut.errors import InputError
from keycut.reporting.frame import SEEDS, Cell, Key
from keycut.reporting.grid import lower_is_better

Answer = Literal["holds", "fails", "not decided"]
NO_CELL = "no cell of it in this run"


class Cells(Section):
    """Cells by the columns of the results. What is not named is free."""

    model: Many[Name] = ()
    conv_sharing: Many[Literal["none", "head", "all"]] = ()
    method: Many[str] = ()
    target: Many[Target] = ()
    compression: Many[float] = ()
    head_k_dim: Many[int] = ()
    rft: Many[Literal["none", "pre", "post"]] = ()

    def match(self, key: Key) -> bool:
        return all(
            not (wanted := getattr(self, field)) or getattr(key, field) in wanted
            for field in type(self).model_fields
        )

    def beside(self, key: Key, other: Key) -> bool:
        """Whether `other` is the partner of `key`: these cells, and the same in all not named."""
        if not self.match(other) or key.metric != other.metric or key == other:
            return False
        same = ["model", "conv_sharing"]
        if self.method != (BASELINE,):  # of which a model has one, whatever was cut
            same += ["method", "target", "compression", "rft"]
        return all(getattr(self, f) or getattr(key, f) == getattr(other, f) for f in same)


class ClaimBase(Section):
    id: Name
    says: str = Field(description="the claim, in our words, with the bounds that are ours")
    place: str = Field(description="where the paper makes it: lines of its LaTeX source")
    measures: Some[Name] = Field(description="columns, or what tasks measure: word_perplexity")
    of: Cells = Field(description="the cells that it is about")
    share: Annotated[Fractional, Field(gt=0)] = Field(1.0, description="comparisons that must hold")
    errata: Many[Name] = Field((), description="errata that say the paper's numbers contradict it")


class Better(ClaimBase):
    """Each is better than its partners."""

    kind: Literal["better"] = WHICH
    against: Cells


class Within(ClaimBase):
    """Each is at most so many times worse than its partners."""

    kind: Literal["within"] = WHICH
    against: Cells
    factor: PositiveFloat


class Adds(ClaimBase):
    """Each is its partner plus a value, give or take a margin."""

    kind: Literal["adds"] = WHICH
    against: Cells
    value: float
    margin: PositiveFloat


class Recovers(ClaimBase):
    """Of what its partner lost against the baseline, each has this fraction back, or more."""

    kind: Literal["recovers"] = WHICH
    against: Cells
    fraction: Fractional


class About(ClaimBase):
    """Each is a value, give or take a margin."""

    kind: Literal["about"] = WHICH
    value: float
    margin: PositiveFloat


class Above(ClaimBase):
    """Each is larger than a bound."""

    kind: Literal["above"] = WHICH
    bound: float


Claim = Annotated[Better | Within | Adds | Recovers | About | Above, Field(discriminator="kind")]


@dataclass(frozen=True)
class Comparison:
    """One comparison: true, false, or open, for lack of a number or too close to tell."""

    of: Key
    against: Key | None
    numbers: str
    outcome: bool | None
    missing: bool
    few_draws: bool = False  # of something drawn, fewer than say how much that matters


@dataclass(frozen=True)
class Answered:
    claim: Claim
    answer: Answer
    comparisons: tuple[Comparison, ...]

    @property
    def numbers(self) -> str:
        """How many comparisons came out how, and those that did not hold."""
        outcomes = [one.outcome for one in self.comparisons]
        if not outcomes:
            return NO_CELL
        missing = sum(one.missing for one in self.comparisons)
        counts = {
            "not measured": missing,
            "too close to tell": outcomes.count(None) - missing,
            f"decided by fewer than {SEEDS} draws": sum(
                one.few_draws and one.outcome is not None for one in self.comparisons
            ),
        }
        said = [f"{outcomes.count(True)} of {len(outcomes)} true"]
        said += [f"{count} {what}" for what, count in counts.items() if count]
        against = [one.numbers for one in self.comparisons if one.outcome is False]
        return "; ".join([", ".join(said), *against])


def read_claims(path: Path | str) -> list[Claim]:
    try:
        return TypeAdapter(list[Claim]).validate_python(yaml.safe_load(Path(path).read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from None


def answer(config: Config, claim: Claim, cells: Mapping[Key, Cell]) -> Answered:
    """What a run's numbers say of a claim."""
    measured = {key: cell for key, cell in cells.items() if _measures(config, claim, key.metric)}
    about = [key for key in measured if claim.of.match(key)]
    found = tuple(
        replace(one, few_draws=_few_draws(config, one, measured))
        for key in about
        for one in _compare(config, claim, key, measured)
    )
    false = sum(one.outcome is False for one in found)
    true = sum(one.outcome is True for one in found)
    # Counted in whole comparisons: 0.9 of 10 is 9, whatever floating point makes of it.
    allowed = math.floor(len(found) * (1 - claim.share) + 1e-9)
    word: Answer = "not decided"
    if false > allowed:
        word = "fails"
    elif found and true >= len(found) - allowed:
        word = "holds"
    return Answered(claim, word, found)


def _few_draws(config: Config, one: Comparison, cells: Mapping[Key, Cell]) -> bool:
    keys = [key for key in (one.of, one.against) if key is not None]
    return any(
        cells[key].seeds < SEEDS
        and key.method in config.methods
        and (config.methods[key.method].drawn or key.rft == "post")
        for key in keys
    )


def _measures(config: Config, claim: Claim, metric: str) -> bool:
    """Whether a column is one that the claim is about, by its name or by what its task measures."""
    tasks = [
        suite.tasks[metric] for suite in config.evaluation.suites.values() if metric in suite.tasks
    ]
    return metric in claim.measures or any(task.metric in claim.measures for task in tasks)


def _compare(
    config: Config, claim: Claim, key: Key, cells: Mapping[Key, Cell]
) -> Iterator[Comparison]:
    cell = cells[key]
    if isinstance(claim, About | Above):
        yield Comparison(key, None, _numbers(key, cell), _alone(claim, cell), not _known(cell))
        return
    for other in cells:
        if not claim.against.beside(key, other):
            continue
        numbers = f"{_numbers(key, cell)} against {_numbers(other, cells[other])}"
        if isinstance(claim, Recovers):
            whole = cells.get(key._replace(method=BASELINE, target="", compression=0.0, rft="none"))
            sign = 1 if lower_is_better(config, key.metric) else -1
            if whole and _known(whole, cells[other]) and _lost(sign, cells[other], whole) <= 0:
                continue  # nothing was lost, so nothing can come back
            outcome = _recovered(claim, sign, cell, cells[other], whole)
            missing = whole is None or not _known(cell, cells[other], whole)
        else:
            lower = lower_is_better(config, key.metric)
            outcome = _pair(claim, lower, cell, cells[other])
            missing = not _known(cell, cells[other])
        yield Comparison(key, other, numbers, outcome, missing)


def _alone(claim: About | Above, cell: Cell) -> bool | None:
    if cell.value is None:
        return None
    if isinstance(claim, Above):
        return _decide(cell.value - claim.bound, uncertain((1, cell)))
    return _decide(claim.margin - abs(cell.value - claim.value), uncertain((1, cell)), equal=True)


def _pair(claim: Better | Within | Adds, lower: bool, cell: Cell, other: Cell) -> bool | None:
    if cell.value is None or other.value is None:
        return None
    unsure = uncertain((1, cell), (-1, other))
    if isinstance(claim, Better):
        return _decide((other.value - cell.value) * (1 if lower else -1), unsure)
    if isinstance(claim, Adds):
        off = abs(cell.value - other.value - claim.value)
        return _decide(claim.margin - off, unsure, equal=True)
    worse, better = (cell, other) if lower else (other, cell)
    unsure = uncertain((claim.factor, better), (-1, worse))
    limit = claim.factor * (better.value or 0.0)
    return _decide(limit - (worse.value or 0.0), unsure, equal=True)


def _recovered(
    claim: Recovers, sign: int, cell: Cell, before: Cell, whole: Cell | None
) -> bool | None:
    if whole is None or not _known(cell, before, whole):
        return None
    # Kept <= (1 - fraction) lost, linear in all three numbers.
    rest = 1 - claim.fraction
    spare = rest * _lost(sign, before, whole) - _lost(sign, cell, whole)
    unsure = uncertain((rest, before), (-1, cell), (claim.fraction, whole))
    return _decide(spare, unsure, equal=True)


def uncertain(*terms: tuple[float, Cell]) -> float:
    """Twice the error of a sum of cells, each times its factor; unknown parts count as none."""
    spreads = (factor * (cell.spread or 0.0) for factor, cell in terms)
    return 2 * math.hypot(*spreads, _drawn_error(terms))


def _drawn_error(terms: Sequence[tuple[float, Cell]]) -> float:
    """What of it is owed to the draw of documents: of the same ones, their spread as one sum."""
    draws = [(factor, cell.draws) for factor, cell in terms if cell.draws]
    if len(draws) == len(terms) and len({one.of for _, one in draws}) == 1:
        return float(np.std(sum(factor * np.array(one.values) for factor, one in draws), ddof=1))
    return math.hypot(*(factor * (cell.stderr or 0.0) for factor, cell in terms))


def _lost(sign: int, cell: Cell, whole: Cell) -> float:
    assert cell.value is not None
    assert whole.value is not None
    return sign * (cell.value - whole.value)


def _known(*cells: Cell) -> bool:
    return all(cell.value is not None for cell in cells)


def _decide(margin: float, uncertain: float, *, equal: bool = False) -> bool | None:
    """True or false by the sign of a margin, open within what is uncertain.

    A margin of zero is open for `better`, which is strict, and true for a bound, which is not.
    """
    slack = 1e-9
    if margin > uncertain + slack or (equal and margin >= uncertain - slack):
        return True
    return False if margin < -uncertain - slack else None


def _numbers(key: Key, cell: Cell) -> str:
    parts = (key.model, key.conv_sharing, key.method, key.target, key.rft, key.metric)
    named = [part for part in parts if part not in ("", "none")]
    if key.compression:
        named.append(f"{100 * key.compression:g} %")
    if key.head_k_dim:
        named.append(f"d_k {key.head_k_dim}")
    value = "missing" if cell.value is None else f"{cell.value:.6g}"
    return f"{' '.join(named)}: {value}"
