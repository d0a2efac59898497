"""The paper's claims (config/claims.yaml), and which of them a run's numbers confirm.

A claim is a comparison, made wherever a run has the cells for it, so that a small run can answer it
too. A comparison is true or false if the difference is larger than 2 sqrt(spread² + spread² +
error²), and open otherwise, or if a number is missing. `spread` is over seeds; `error` is that of
the difference over draws of documents, which is far smaller than that of either number.
docs/results/claims.md says what counts for perplexities and timings.

The paper's models decide its claims. Those that name no model are also asked of every other model
of a run, each for itself. Of cut models, those count whose eps is the run's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import Literal, get_args

import numpy as np
import yaml
from pydantic import Field, TypeAdapter

from reproduction.config import BASELINE, Config, QualityTable
from reproduction.config.section import RECOVERED, Many, Name, Section, Some
from reproduction.reporting.frame import (
    SEEDS,
    Cell,
    Key,
    lower_is_better,
    published_name,
    timing_key,
)
from statecut.arguments import Target

Answer = Literal["holds", "holds so far", "fails", "undecided", "not measured"]
MARKS: dict[Answer, str] = dict(zip(get_args(Answer), "✓✓✗?–", strict=True))
MEANINGS = {
    "✓": "holds: every comparison is true (“so far”: of those that were measured)",
    "✗": "fails: at least one comparison is false",
    "?": "undecided: no comparison is false, and some are too close to tell",
    "–": "not measured: the run has no numbers for it",
    "*": f"decided by fewer than {SEEDS} draws: other seeds may give another answer",
}
PAPER = ("delta_net", "delta_net_shared_conv", "gated_deltanet")  # the model types that it has
NUMERICAL = 0.002
"""The numerical margin: of a perplexity or a timing this part, of an accuracy in percent this part
of 100. The same weights in bf16 through other kernels differ by up to 0.13 % in perplexity, and by
one question of 200, which is 0.2 points of the paper's smallest task (an H200 and a CPU,
2026-11-16)."""


class Cells(Section):
    """Cells by the columns of the results. A column that is not named is free."""

    model: Many[Name] = ()
    conv_sharing: Many[Literal["none", "head", "all"]] = ()
    method: Many[str] = ()
    target: Many[Target] = ()
    compression: Many[float] = ()
    head_k_dim: Many[int] = ()
    head_v_dim: Many[int] = ()
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
            same += ["head_k_dim", "head_v_dim"] * bool(key.target)  # widths that a cut left
        return all(getattr(self, f) or getattr(key, f) == getattr(other, f) for f in same)


class Claim(Section):
    """What is said of each cell, alone or against its partners:

    better    it is better than its partners
    within    it is at most `factor` times worse
    adds      it is its partner plus `value`, give or take `margin`
    recovers  of what its partner lost against the baseline it has `fraction` back, or more
    about     it is `value`, give or take `margin`
    above     it is larger than `bound`
    """

    id: Name
    about: str = Field(description="the group that it is shown in")
    says: str = Field(description="the claim, in our words, with the bounds that are ours")
    place: str = Field(description="where the paper makes it: lines of its LaTeX source")
    kind: Literal["better", "within", "adds", "recovers", "about", "above"]
    measures: Some[Name] = Field(description="columns, or what tasks measure: word_perplexity")
    of: Cells = Field(description="the cells that it is about")
    against: Cells | None = Field(None, description="their partners")
    factor: float = 1.0
    value: float = 0.0
    margin: float = 0.0
    fraction: float = 0.0
    bound: float = 0.0
    errata: Many[Name] = Field((), description="errata that say the paper's numbers contradict it")

    def surplus(self, lower: bool, value: float, *others: float) -> tuple[float, tuple[float, ...]]:
        """By how much a comparison is true, and how that changes with each value.

        `others`: the partner's value, and for `recovers` the unpruned model's. `lower`: whether
        lower values are better.
        """
        if self.kind in ("better", "within"):
            [other] = others
            if lower:
                return math.log(self.factor * other / value), (-1 / value, 1 / other)
            return self.factor * value - other, (self.factor, -1)
        if self.kind == "recovers":
            # What is still lost <= (1 - fraction) of what was lost, linear in all three values.
            before, unpruned = others
            rest, sign = 1 - self.fraction, 1 if lower else -1
            surplus = rest * (sign * (before - unpruned)) - sign * (value - unpruned)
            return surplus, (-1, rest, self.fraction)
        if self.kind == "above":
            return value - self.bound, (1,)
        return self.margin - abs(value - sum(others) - self.value), (1, -1)[: 1 + len(others)]


@dataclass(frozen=True)
class Comparison:
    """True, false, or open: a number is missing, or the numbers are too close to tell."""

    of: Key
    numbers: str
    outcome: bool | None
    missing: bool
    few_draws: bool  # it depends on seeds or trainings, and there are fewer than SEEDS


@dataclass(frozen=True)
class Answered:
    claim: Claim
    comparisons: tuple[Comparison, ...]
    model: str = ""  # that it was asked of, if that is none of the paper's

    @property
    def answer(self) -> Answer:
        return _answer(self.comparisons)

    @property
    def few_draws(self) -> str:
        """Says so if the answer would be open without comparisons of fewer than SEEDS draws."""
        solid = [replace(c, outcome=None) if c.few_draws else c for c in self.comparisons]
        return f"by fewer than {SEEDS} draws" if _answer(solid) != self.answer else ""

    @property
    def errata(self) -> str:
        """Those of the paper's own numbers."""
        return "" if self.model else ", ".join(self.claim.errata)

    @property
    def open_or_false(self) -> list[str]:
        """The numbers of the comparisons that are false; of an undecided claim, of open ones."""
        wanted = None if self.answer == "undecided" else False
        return [c.numbers for c in self.comparisons if c.outcome is wanted and not c.missing]

    @property
    def counts(self) -> str:
        """How many comparisons are true of those that were measured, how many are open and why."""
        if not self.comparisons:
            return "no cell of it in this run"
        measured = [c for c in self.comparisons if not c.missing]
        decided = [c for c in measured if c.outcome is not None]
        true = sum(c.outcome is True for c in decided)
        texts = [f"{true} of {len(measured)} comparisons true"] if measured else []
        for count, what in (
            (len(self.comparisons) - len(measured), "not measured"),
            (len(measured) - len(decided), "too close to tell"),
            (sum(c.few_draws for c in decided), f"decided by fewer than {SEEDS} draws"),
        ):
            texts += [f"{count} {what}"] if count else []
        return ", ".join(texts)


def _answer(comparisons: Sequence[Comparison]) -> Answer:
    outcomes = [comparison.outcome for comparison in comparisons if not comparison.missing]
    if not outcomes:
        return "not measured"
    if False in outcomes:
        return "fails"
    if None in outcomes:
        return "undecided"
    return "holds" if len(outcomes) == len(comparisons) else "holds so far"


def read_claims(path: Path | str) -> list[Claim]:
    return TypeAdapter(list[Claim]).validate_python(yaml.safe_load(Path(path).read_text()))


def answer_all(
    config: Config, claims: Iterable[Claim], cells: Mapping[Key, Cell]
) -> list[Answered]:
    """All claims, asked of the paper's models, and then of others that have cells of them."""
    others = dict.fromkeys(  # by the names that results have for them
        published_name(config, name)[0]
        for name, spec in config.models.items()
        if spec.adapter.model_type not in PAPER
    )
    claims, cells = list(claims), with_repeat_noise(config, cells)
    cells = {key: cell for key, cell in cells.items() if not key.target or key.eps == config.eps}
    papers = {key: cell for key, cell in cells.items() if key.model not in others}
    answers = [answer(config, claim, papers) for claim in claims]
    for model in others:
        own = {key: cell for key, cell in cells.items() if key.model == model}
        of_model = [answer(config, claim, own) for claim in claims if not claim.of.model]
        answers += [replace(part, model=model) for part in of_model if part.comparisons]
    return answers


def with_repeat_noise(config: Config, cells: Mapping[Key, Cell]) -> dict[Key, Cell]:
    """Timings with the standard deviation over their repeats as their error."""
    repeats = {
        timing_key(config, cell, ""): config.benchmarks[cell.benchmark].repeats
        for name, table in config.tables.items()
        if not isinstance(table, QualityTable)
        for cell in config.timings(name)
    }
    noisy = dict(cells)
    for key, cell in cells.items():
        timed = key.head_k_dim is not None and not key.target
        if timed and cell.value is not None:
            mode = re.match("training_|decoding_|", key.metric)[0]  # type: ignore[index]
            # As in benchmarking.record.Runs.stderr, which is that of their median.
            over = math.sqrt(repeats[key._replace(metric=mode)]) / 1.2533
            error = max((cell.stderr or 0.0) * over, NUMERICAL / 2 * abs(cell.value))
            noisy[key] = replace(cell, stderr=error)
    return noisy


def answer(config: Config, claim: Claim, cells: Mapping[Key, Cell]) -> Answered:
    """What a run's numbers say of a claim."""
    # A column counts by its name, or by the metric of its task.
    tasks = {c: t for suite in config.evaluation.suites.values() for c, t in suite.tasks.items()}
    measured = {
        key: cell
        for key, cell in cells.items()
        if key.metric in claim.measures
        or (key.metric in tasks and tasks[key.metric].metric in claim.measures)
    }
    comparisons = (_compare(config, claim, k, measured) for k in measured if claim.of.match(k))
    return Answered(claim, tuple(part for parts in comparisons for part in parts))


def _compare(
    config: Config, claim: Claim, key: Key, cells: Mapping[Key, Cell]
) -> Iterator[Comparison]:
    """A comparison with every partner of a cell, or one without a partner."""
    lower = lower_is_better(config, key.metric)
    pairs: list[tuple[Key, ...]] = [(key,)]
    if claim.against:
        pairs = [(key, other) for other in cells if claim.against.match_partner(key, other)]
    unpruned = Key(key.model, key.conv_sharing, BASELINE, "", 0.0, None, "none", key.metric)
    for pair in pairs:
        keys = (*pair, unpruned) if claim.kind == "recovers" else pair
        values = [cells[k].value if k in cells else None for k in keys]
        known = [value for value in values if value is not None]
        if claim.kind == "recovers" and None not in values[1:]:
            before, whole = known[-2:]
            if before == whole or (before > whole) != lower:
                continue  # nothing was lost, so nothing can come back
        outcome, missing = None, len(known) < len(keys)
        if not missing:
            surplus, factors = claim.surplus(lower, *known)
            uncertain = uncertainty(*zip(factors, (cells[k] for k in keys), strict=True))
            outcome = _decide(surplus, uncertain, strict=claim.kind in ("better", "above"))
        numbers = " against ".join(_describe(k, cells[k]) for k in pair)
        few = any(has_few_seeds(config, k, cells[k].seeds) for k in pair)
        # Two models differ by chance, too, and each is trained once.
        few |= key.head_k_dim is None and len({(k.model, k.conv_sharing) for k in pair}) > 1
        yield Comparison(key, numbers, outcome, missing, few)


def has_few_seeds(config: Config, key: Key, seeds: int) -> bool:
    """Whether a number depends on the run's seeds, and has fewer than SEEDS."""
    method = config.methods.get(key.method)
    return seeds < SEEDS and method is not None and (method.drawn or key.rft in RECOVERED)


def uncertainty(*terms: tuple[float, Cell]) -> float:
    """Twice the error of a sum of cells, each times its factor; unknown parts count as zero."""
    return 2 * math.hypot(_spread(terms), _sampling_error(terms))


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


def _spread(terms: Sequence[tuple[float, Cell]]) -> float:
    """The spread of the sum: over trainings that all cells have, since what is cut from a better
    model is better, too; over seeds, which draw each number by itself."""
    shared, *others = ([*cell.by_training] for _, cell in terms)
    if shared and all(other == shared for other in others):
        return stdev(sum(f * cell.by_training[t] for f, cell in terms) for t in shared)
    return math.hypot(*(factor * (cell.spread or 0.0) for factor, cell in terms))


def _sampling_error(terms: Sequence[tuple[float, Cell]]) -> float:
    """The error of the sum that comes from the choice of documents."""
    draws = [(factor, cell.draws) for factor, cell in terms if cell.draws]
    if len(draws) == len(terms) and len({draw.documents for _, draw in draws}) == 1:
        return float(np.std(sum(factor * np.array(draw.values) for factor, draw in draws), ddof=1))
    return math.hypot(*(factor * (cell.stderr or 0.0) for factor, cell in terms))


def _decide(surplus: float, uncertain: float, *, strict: bool) -> bool | None:
    """True or false by the sign of the surplus, open if it is smaller than the uncertainty; if
    `strict`, a surplus of zero is open too."""
    slack = 1e-9
    if surplus > uncertain + slack or (not strict and surplus >= uncertain - slack):
        return True
    return False if surplus < -uncertain - slack else None


def _describe(key: Key, cell: Cell) -> str:
    parts = [key.model, key.conv_sharing, key.method, key.target, key.rft, key.metric]
    named = [part for part in parts if part not in ("", "none")]
    if key.compression:
        named.append(f"{100 * key.compression:g} %")
    widths = {"d_k": key.head_k_dim, "d_v": key.head_v_dim}
    named += [f"{name} {width}" for name, width in widths.items() if width]
    value = "missing" if cell.value is None else f"{cell.value:.6g}"
    return f"{' '.join(named)}: {value}"
