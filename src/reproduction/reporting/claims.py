"""The paper's claims (config/claims.yaml), and which of them a run's numbers confirm.

A claim is a comparison, made wherever a run has the cells for it, so that a small run can answer it
too. A comparison is true or false if the difference is larger than 2 sqrt(spread² + spread² +
error²), and open otherwise, or if a number is missing. `spread` is over seeds; `error` is that of
the difference over draws of documents. Numbers of the same documents are correlated, so it is far
smaller than their own errors. Perplexities are compared by their logarithms, with relative errors:
what chance does to one of thousands is a factor. What was measured gives the answer:

    holds         its `share` of comparisons is true
    holds so far  of those that were measured; others were not
    fails         more than the rest of those that were measured are false
    not decided   too many of them are too close to tell
    not measured  none was measured

Few seeds give no spread or a poor estimate: the answer says how many comparisons rest on that.

The paper's models decide its claims. Those that name no model are also asked of every other model
of a run, each for itself. Of cut models, those count whose eps is the run's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import yaml
from pydantic import Field, PositiveFloat, TypeAdapter, ValidationError

from reproduction.config import BASELINE, Config
from reproduction.config.section import RECOVERED, WHICH, Fractional, Many, Name, Section, Some
from reproduction.reporting.frame import SEEDS, Cell, Key, lower_is_better, published_name
from statecut.arguments import Target
from statecut.errors import InputError

Answer = Literal["holds", "holds so far", "fails", "not decided", "not measured"]
NO_CELL = "no cell of it in this run"
PAPER = ("delta_net", "delta_net_shared_conv", "gated_deltanet")  # the model types that it has


class Cells(Section):
    """Cells by the columns of the results. A column that is not named is free."""

    model: Many[Name] = ()
    conv_sharing: Many[Literal["none", "head", "all"]] = ()
    method: Many[str] = ()
    target: Many[Target] = ()
    compression: Many[float] = ()
    head_k_dim: Many[int] = ()
    rft: Many[Literal["none", "pre", "post"]] = ()

    def match(self, key: Key) -> bool:
        return all(
            not (values := getattr(self, field)) or getattr(key, field) in values
            for field in type(self).model_fields
        )

    def match_partner(self, key: Key, other: Key) -> bool:
        """Whether `other` is one of these cells, and equal to `key` in all columns not named."""
        if not self.match(other) or key.metric != other.metric or key == other:
            return False
        same = ["model", "conv_sharing"]
        if self.method != (BASELINE,):  # a model has one, whatever was cut
            same += ["method", "target", "compression", "rft"]
        return all(getattr(self, f) or getattr(key, f) == getattr(other, f) for f in same)


class ClaimBase(Section):
    id: Name
    about: str = Field(description="the group that it is shown in")
    says: str = Field(description="the claim, in our words, with the bounds that are ours")
    place: str = Field(description="where the paper makes it: lines of its LaTeX source")
    measures: Some[Name] = Field(description="columns, or what tasks measure: word_perplexity")
    of: Cells = Field(description="the cells that it is about")
    share: Annotated[Fractional, Field(gt=0)] = Field(1.0, description="comparisons that must hold")
    errata: Many[Name] = Field((), description="errata that say the paper's numbers contradict it")

    strict: ClassVar[bool] = False  # a surplus of zero is open, not true

    def surplus(self, lower: bool, *values: float) -> tuple[float, tuple[float, ...]]:
        """By how much a comparison is true, and how that changes with each value.

        The values are those of a cell, of its partner if there is one, and for `Recovers` of the
        unpruned model. `lower`: whether lower values are better.
        """
        raise NotImplementedError


class Better(ClaimBase):
    """Each is better than its partners."""

    kind: Literal["better"] = WHICH
    against: Cells
    strict = True

    def surplus(self, lower: bool, *values: float) -> tuple[float, tuple[float, ...]]:
        value, other = values
        if lower:
            return math.log(other / value), (-1 / value, 1 / other)
        return value - other, (1, -1)


class Within(ClaimBase):
    """Each is at most so many times worse than its partners."""

    kind: Literal["within"] = WHICH
    against: Cells
    factor: PositiveFloat

    def surplus(self, lower: bool, *values: float) -> tuple[float, tuple[float, ...]]:
        value, other = values
        if lower:
            return math.log(self.factor * other / value), (-1 / value, 1 / other)
        return self.factor * value - other, (self.factor, -1)


class Adds(ClaimBase):
    """Each is its partner plus a value, give or take a margin."""

    kind: Literal["adds"] = WHICH
    against: Cells
    value: float
    margin: PositiveFloat

    def surplus(self, lower: bool, *values: float) -> tuple[float, tuple[float, ...]]:
        value, other = values
        return self.margin - abs(value - other - self.value), (1, -1)


class Recovers(ClaimBase):
    """Of what its partner lost against the baseline, each has this fraction back, or more."""

    kind: Literal["recovers"] = WHICH
    against: Cells
    fraction: Fractional

    def surplus(self, lower: bool, *values: float) -> tuple[float, tuple[float, ...]]:
        value, before, unpruned = values
        rest, sign = 1 - self.fraction, 1 if lower else -1
        # What is still lost <= (1 - fraction) of what was lost, linear in all three values.
        surplus = rest * (sign * (before - unpruned)) - sign * (value - unpruned)
        return surplus, (-1, rest, self.fraction)


class About(ClaimBase):
    """Each is a value, give or take a margin."""

    kind: Literal["about"] = WHICH
    value: float
    margin: PositiveFloat

    def surplus(self, lower: bool, *values: float) -> tuple[float, tuple[float, ...]]:
        return self.margin - abs(values[0] - self.value), (1,)


class Above(ClaimBase):
    """Each is larger than a bound."""

    kind: Literal["above"] = WHICH
    bound: float
    strict = True

    def surplus(self, lower: bool, *values: float) -> tuple[float, tuple[float, ...]]:
        return values[0] - self.bound, (1,)


Claim = Annotated[Better | Within | Adds | Recovers | About | Above, Field(discriminator="kind")]


@dataclass(frozen=True)
class Comparison:
    """True, false, or open: a number is missing, or the numbers are too close to tell."""

    of: Key
    against: Key | None
    numbers: str
    outcome: bool | None
    missing: bool
    few_seeds: bool  # it depends on seeds, and there are fewer than SEEDS


@dataclass(frozen=True)
class Answered:
    claim: Claim
    answer: Answer
    comparisons: tuple[Comparison, ...]
    model: str = ""  # that it was asked of, if that is none of the paper's

    @property
    def errata(self) -> str:
        """Those of the paper's own numbers."""
        return "" if self.model else ", ".join(self.claim.errata)

    @property
    def numbers(self) -> str:
        """The counts, and the numbers of the false comparisons."""
        return "; ".join([self.counts, *self.false])

    @property
    def false(self) -> list[str]:
        """The numbers of the comparisons that are false."""
        return [part.numbers for part in self.comparisons if part.outcome is False]

    @property
    def counts(self) -> str:
        """How many comparisons are true of those that were measured, how many are open and why."""
        if not self.comparisons:
            return NO_CELL
        measured = [comparison for comparison in self.comparisons if not comparison.missing]
        decided = [comparison for comparison in measured if comparison.outcome is not None]
        counts = {
            "not measured": len(self.comparisons) - len(measured),
            "too close to tell": len(measured) - len(decided),
            f"decided by fewer than {SEEDS} draws": sum(
                comparison.few_seeds for comparison in decided
            ),
        }
        true = sum(comparison.outcome is True for comparison in decided)
        summary = [f"{true} of {len(measured)} comparisons true"] if measured else []
        summary += [f"{count} {what}" for what, count in counts.items() if count]
        return ", ".join(summary)


def read_claims(path: Path | str) -> list[Claim]:
    try:
        return TypeAdapter(list[Claim]).validate_python(yaml.safe_load(Path(path).read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from None


def answer_all(
    config: Config, claims: Iterable[Claim], cells: Mapping[Key, Cell]
) -> list[Answered]:
    """All claims, asked of the paper's models, and then of others that have cells of them."""
    claims, others = list(claims), _other_models(config)
    cells = {key: cell for key, cell in cells.items() if not key.target or key.eps == config.eps}
    answers = [
        answer(config, claim, {k: cell for k, cell in cells.items() if k.model not in others})
        for claim in claims
    ]
    for model in others:
        own = {key: cell for key, cell in cells.items() if key.model == model}
        of_model = [answer(config, claim, own) for claim in claims if not claim.of.model]
        answers += [replace(part, model=model) for part in of_model if part.comparisons]
    return answers


def _other_models(config: Config) -> list[str]:
    """By the names that results have for them."""
    return [
        published_name(config, name)[0]
        for name, spec in config.models.items()
        if spec.adapter.model_type not in PAPER
    ]


def answer(config: Config, claim: Claim, cells: Mapping[Key, Cell]) -> Answered:
    """What a run's numbers say of a claim."""
    measured = {key: cell for key, cell in cells.items() if _measures(config, claim, key.metric)}
    comparisons = tuple(
        comparison
        for key in measured
        if claim.of.match(key)
        for comparison in _compare(config, claim, key, measured)
    )
    outcomes = [comparison.outcome for comparison in comparisons if not comparison.missing]
    # In whole comparisons: 0.9 of 10 is 9, whatever floating point makes of it.
    allowed = math.floor(len(outcomes) * (1 - claim.share) + 1e-9)
    word: Answer = "not decided"
    if not outcomes:
        word = "not measured"
    elif outcomes.count(False) > allowed:
        word = "fails"
    elif outcomes.count(True) >= len(outcomes) - allowed:
        word = "holds" if len(outcomes) == len(comparisons) else "holds so far"
    return Answered(claim, word, comparisons)


def _measures(config: Config, claim: Claim, metric: str) -> bool:
    """Whether a claim is about a column, by its name or by the metric of its task."""
    tasks = [
        suite.tasks[metric] for suite in config.evaluation.suites.values() if metric in suite.tasks
    ]
    return metric in claim.measures or any(task.metric in claim.measures for task in tasks)


def _compare(
    config: Config, claim: Claim, key: Key, cells: Mapping[Key, Cell]
) -> Iterator[Comparison]:
    """A comparison with every partner of a cell, or one without a partner."""
    lower = lower_is_better(config, key.metric)
    pairs: list[tuple[Key, ...]] = [(key,)]
    if not isinstance(claim, About | Above):
        pairs = [(key, other) for other in cells if claim.against.match_partner(key, other)]
    unpruned = key._replace(method=BASELINE, target="", compression=0.0, rft="none", eps="kept")
    for pair in pairs:
        keys = pair
        if isinstance(claim, Recovers):
            keys = (*pair, unpruned)
            lost = _difference(cells[pair[1]], cells.get(unpruned))
            if lost is not None and (lost == 0 or (lost > 0) != lower):
                continue  # nothing was lost, so nothing can come back
        values = [value for k in keys if k in cells and (value := cells[k].value) is not None]
        missing = len(values) < len(keys)
        outcome = None
        if not missing:
            surplus, factors = claim.surplus(lower, *values)
            terms = zip(factors, (cells[k] for k in keys), strict=True)
            outcome = _decide(surplus, uncertainty(*terms), strict=claim.strict)
        numbers = " against ".join(_describe(k, cells[k]) for k in pair)
        few_seeds = any(has_few_seeds(config, k, cells[k].seeds) for k in pair)
        yield Comparison(key, pair[1] if pair[1:] else None, numbers, outcome, missing, few_seeds)


def _difference(cell: Cell, other: Cell | None) -> float | None:
    if cell.value is None or other is None or other.value is None:
        return None
    return cell.value - other.value


def has_few_seeds(config: Config, key: Key, seeds: int) -> bool:
    """Whether a number depends on the run's seeds, and has fewer than SEEDS."""
    method = config.methods.get(key.method)
    return seeds < SEEDS and method is not None and (method.drawn or key.rft in RECOVERED)


def uncertainty(*terms: tuple[float, Cell]) -> float:
    """Twice the error of a sum of cells, each times its factor; unknown parts count as zero."""
    spreads = (factor * (cell.spread or 0.0) for factor, cell in terms)
    return 2 * math.hypot(*spreads, _sampling_error(terms))


def differ(cell: Cell, other: Cell) -> bool:
    """Whether two numbers are further apart than what is uncertain; by their ratio if there is one,
    as perplexities are compared."""
    value, against = cell.value, other.value
    if value is None or against is None:
        return False
    apart, factors = value - against, (1.0, -1.0)
    if min(value, against) > 0:
        apart, factors = math.log(value / against), (1 / value, -1 / against)
    return abs(apart) > uncertainty(*zip(factors, (cell, other), strict=True))


def _sampling_error(terms: Sequence[tuple[float, Cell]]) -> float:
    """The error of the sum that comes from the choice of documents."""
    draws = [(factor, cell.draws) for factor, cell in terms if cell.draws]
    if len(draws) == len(terms) and len({draw.documents for _, draw in draws}) == 1:
        return float(np.std(sum(factor * np.array(draw.values) for factor, draw in draws), ddof=1))
    return math.hypot(*(factor * (cell.stderr or 0.0) for factor, cell in terms))


def _decide(surplus: float, uncertain: float, *, strict: bool) -> bool | None:
    """True or false by the sign of the surplus, open if it is smaller than the uncertainty."""
    slack = 1e-9
    if surplus > uncertain + slack or (not strict and surplus >= uncertain - slack):
        return True
    return False if surplus < -uncertain - slack else None


def _describe(key: Key, cell: Cell) -> str:
    parts = [key.model, key.conv_sharing, key.method, key.target, key.rft, key.metric]
    named = [part for part in parts if part not in ("", "none")]
    if key.compression:
        named.append(f"{100 * key.compression:g} %")
    if key.head_k_dim:
        named.append(f"d_k {key.head_k_dim}")
    value = "missing" if cell.value is None else f"{cell.value:.6g}"
    return f"{' '.join(named)}: {value}"
