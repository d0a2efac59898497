"""The verdict: every number that the paper prints, next to ours, and one of seven words.

Ours is that with eps kept, as the paper's code leaves it. Inside means |ours - paper's| <=
tolerance, which is what can make two right numbers differ, and nothing else:

    t s sqrt(1 + 1/n)  s is the standard deviation over our n seeds, or n trainings where there are
                       several: ours is the mean of n draws, the paper's one more draw. Student's t
                       for n - 1 degrees of freedom makes up for an s from few draws; one right
                       number in a hundred is outside by chance
    documents          only where ours are not the paper's (`note`): twice the standard error of the
                       difference of two samples. Timings have that of their repeats
    half a digit       the paper's rounding
    NUMERICAL          kernels in bf16 and versions of libraries

Whether a number can be judged depends on what it took to get it, not on how it came out. The first
line that applies gives the word:

1. not attempted            we have no number; the reason is given
2. undecided                ours was measured under another protocol than the paper's, or the
                            paper's other numbers contradict it (an erratum of kind `value`)
3. agrees, one draw         there is chance (in selection, recovery, pretraining or timing), with
   disagrees, one draw      fewer than three draws: inside or outside
4. reproduced               inside; it says so where the paper's number of the unpruned model is
                            inside too, since this tolerance cannot tell the two apart
5. direction only           outside, but on the paper's side of the unpruned model, in both by more
                            than the tolerance
6. differs                  outside

4 to 6 are decided; 5 and 6 are failures, and `reproduction compare` exits with 1.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pandas as pd

from reproduction.config import BASELINE, Config
from reproduction.config.evaluation import FRACTIONS
from reproduction.reporting.claims import (
    MARKS,
    MEANINGS,
    NUMERICAL,
    Answered,
    answer_all,
    has_few_seeds,
    read_claims,
)
from reproduction.reporting.frame import (
    SEEDS,
    Cell,
    Key,
    Printed,
    Result,
    cells,
    published_name,
    read_key,
    read_published,
    read_results,
)
from reproduction.running.code import ROOT
from statecut.files import atomic_write

PUBLISHED = ROOT / "config/published"
CLAIMS = ROOT / "config/claims.yaml"

Word = Literal[
    "reproduced",
    "direction only",
    "differs",
    "agrees, one draw",
    "disagrees, one draw",
    "undecided",
    "not attempted",
]
OUTSIDE: tuple[Word, ...] = ("direction only", "differs")
DECIDED: tuple[Word, ...] = ("reproduced", *OUTSIDE)
BLUNT = "the paper's number of the unpruned model is inside too"
STUDENT = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250)
"""Student's t that 99 % of draws are below in size, for 1, 2, ... degrees of freedom."""
CONSTANT = ("peak_memory_gib", "memory_ratio")
"""Results of benchmarks that are the same each time."""


class Erratum(NamedTuple):
    """Where the paper contradicts itself: a `value`, a `mark`, or its `text` about a cell."""

    id: str
    kind: str
    table: str
    key: Key
    printed: str
    follows: str


def read_errata(path: Path | str) -> list[Erratum]:
    with open(path, newline="") as file:
        return [
            Erratum(key=read_key(row), **{f: row[f] for f in Erratum._fields if f != "key"})
            for row in csv.DictReader(file)
        ]


def claims_only(config: Config) -> str:
    """Why cells of a run do not compare with the paper's, only claims; empty if they do.

    The protocol `paper` promises the paper's settings; a run under another one is another
    experiment, also where names and widths happen to agree. So is one whose cuts match eps.
    """
    reasons = []
    if (protocol := config.evaluation.protocol) != "paper":
        reasons.append(f"has protocol {protocol}")
    if config.eps == "matched":
        reasons.append("matches eps in its cuts, which the paper does not")
    text = f"run {config.run} {' and '.join(reasons)}: it compares claims only, not cells"
    return text if reasons else ""


class Judgement(NamedTuple):
    """A number that the paper prints, ours, and its word: a row of cells.csv."""

    table: str
    key: Key
    ours: float | None
    paper: float
    difference: float | None
    tolerance: float | None
    seeds: int
    word: Word
    why: str
    errata: str
    note: str = ""  # if the data of its task is from elsewhere


def judge(
    config: Config,
    tables: Mapping[str, Iterable[Result]],
    published: Sequence[Printed],
    errata: Iterable[Erratum] = (),
) -> list[Judgement]:
    """A word for every printed number, from the results of the tables."""
    ours = {table: cells(results) for table, results in tables.items()}
    unpruned = {_subject(p): p for p in published if p.key.method == BASELINE}
    by_cell: dict[tuple[str, Key], list[Erratum]] = {}
    for erratum in errata:
        by_cell.setdefault((erratum.table, erratum.key), []).append(erratum)
    return [
        _judge(
            config,
            printed,
            unpruned[_subject(printed)],
            ours.get(printed.table, {}),
            by_cell.get((printed.table, printed.key), []),
        )
        for printed in published
    ]


def _judge(
    config: Config,
    printed: Printed,
    baseline: Printed,
    measured: Mapping[Key, Cell],
    errata: Sequence[Erratum],
) -> Judgement:
    table, key, paper = printed[:3]
    errors = "; ".join(f"{e.id}: {e.printed} -> {e.follows}" for e in errata)
    ours = measured.get(key)
    if ours is None or ours.value is None:
        why = ours.reason if ours else "no such table in this run"
        return Judgement(table, key, None, paper, None, None, 0, "not attempted", why, errors)
    difference, limit = ours.value - paper, tolerance(config, ours, printed)
    inside, why = is_inside(difference, limit), ""
    word: Word = "reproduced" if inside else "differs"
    if protocols := ours.protocols - {"paper"}:
        word, why = "undecided", f"measured under protocol {', '.join(sorted(protocols))}"
    elif ids := [erratum.id for erratum in errata if erratum.kind == "value"]:
        word, why = "undecided", f"the paper's own numbers contradict it ({', '.join(ids)})"
    elif why := too_few_draws(config, key, ours):
        word = "agrees, one draw" if inside else "disagrees, one draw"
    elif inside and key != baseline.key and is_inside(baseline.value - paper, limit):
        why = BLUNT
    elif not inside and _same_direction(config, printed, baseline, ours, measured):
        word = "direction only"
    numbers = ours.value, paper, difference, limit, ours.count
    return Judgement(table, key, *numbers, word, why, errors, ours.note)


def tolerance(config: Config, ours: Cell, printed: Printed) -> float:
    """How far ours may be from the paper's number; unknown parts count as zero."""
    seeds = documents = 0.0
    if ours.spread is not None:
        student = STUDENT[min(ours.count - 1, len(STUDENT)) - 1]
        seeds = student * ours.spread * math.sqrt(1 + 1 / ours.count)
    if printed.key.head_k_dim is not None or ours.note:
        documents = 2 * math.sqrt(2) * (ours.stderr or 0.0)
    size = 100.0 if _is_accuracy(config, printed.key.metric) else abs(printed.value)
    return math.hypot(seeds, documents) + printed.digit / 2 + NUMERICAL * size


def _is_accuracy(config: Config, metric: str) -> bool:
    """A column in percent, or a mean of such columns."""
    return any(
        suite.tasks[metric].metric in FRACTIONS if metric in suite.tasks else metric == suite.mean
        for suite in config.evaluation.suites.values()
    )


def is_inside(difference: float, tolerance: float) -> bool:
    """Also a difference of exactly half a printed digit, whatever floating point makes of it."""
    return abs(difference) <= tolerance * (1 + 1e-9)


def _subject(printed: Printed) -> tuple[str, str, str, str]:
    return printed.table, printed.key.model, printed.key.conv_sharing, printed.key.metric


def too_few_draws(config: Config, key: Key, ours: Cell) -> str:
    """The random step behind a number that was drawn too seldom to judge it; empty if none was.

    Enough trainings are enough draws of what hangs on each; a run times everything once.
    """
    if ours.trainings >= SEEDS:
        return ""
    if key.head_k_dim is not None:  # a benchmark
        return "" if key.metric in CONSTANT else "timed once"
    if any(
        published_name(config, name) == (key.model, key.conv_sharing)
        and model.source.kind == "pretrain"
        for name, model in config.models.items()
    ):
        return "pretrained once" if ours.trainings == 1 else f"pretrained {ours.trainings} times"
    few = has_few_seeds(config, key, ours.seeds)
    return f"{ours.seeds} of at least {SEEDS} seeds" if few else ""


def _same_direction(
    config: Config, printed: Printed, base: Printed, ours: Cell, measured: Mapping[Key, Cell]
) -> bool:
    our_base = measured.get(base.key)
    if printed.key == base.key or our_base is None or our_base.value is None or ours.value is None:
        return False
    theirs, mine = printed.value - base.value, ours.value - our_base.value
    uncertain = tolerance(config, ours, printed) + tolerance(config, our_base, base)
    clear = abs(theirs) > (printed.digit + base.digit) / 2 and abs(mine) > uncertain
    return clear and (theirs > 0) == (mine > 0)


@dataclass(frozen=True)
class PaperVerdict:
    """What a run says of the paper: its cells, where they compare, and its claims."""

    scope: str  # why cells do not compare; empty if they do
    cells: Sequence[Judgement]
    claims: Sequence[Answered]


def reach_verdict(config: Config, tables: Mapping[str, Iterable[Result]]) -> PaperVerdict:
    """From the results of a run's tables, by table."""
    scope, judgements = claims_only(config), []
    if not scope:
        published, errata = (PUBLISHED / name for name in ("values.csv", "errata.csv"))
        judgements = judge(config, tables, read_published(published), read_errata(errata))
    # A claim compares cells of one training: others have it of fewer.
    first = [r for results in tables.values() for r in results if not r.training]
    ours = cells(dict.fromkeys(first))
    return PaperVerdict(scope, judgements, answer_all(config, read_claims(CLAIMS), ours))


def make_verdict(config: Config, frames: Iterable[Path | str], out: Path | str) -> None:
    """cells.csv, claims.csv and verdict.txt in a folder, from the frames of all tables in order."""
    tables = dict(zip(config.tables, map(read_results, frames), strict=True))
    write_verdict(reach_verdict(config, tables), out)


def write_verdict(verdict: PaperVerdict, folder: Path | str) -> None:
    cells = pd.DataFrame(
        [(judgement.table, *judgement.key, *judgement[2:]) for judgement in verdict.cells],
        columns=["table", *Key._fields, *Judgement._fields[2:]],
    )
    claims = pd.DataFrame(
        {
            "model": answered.model,
            **{name: getattr(answered.claim, name) for name in ("id", "about", "says", "place")},
            "answer": answered.answer,
            "numbers": "; ".join([answered.counts, *answered.open_or_false]),
            "errata": answered.errata,
            "few_draws": answered.few_draws,
        }
        for answered in verdict.claims
    )
    texts = {
        "cells.csv": cells.astype({"head_k_dim": "Int64"}).to_csv(index=False),
        "claims.csv": claims.to_csv(index=False),
        "verdict.txt": to_text(verdict),
    }
    for name, text in texts.items():
        with atomic_write(Path(folder) / name, force=True) as aside:
            aside.write_text(text)


def to_text(verdict: PaperVerdict) -> str:
    """The verdict to be read: what was counted, the marks, every claim, and numbers outside."""
    lines = [tally(answered for answered in verdict.claims if not answered.model)]
    lines += [verdict.scope] if verdict.scope else count_words(verdict.cells)
    notes = Counter(judgement.note for judgement in verdict.cells if judgement.note)
    lines += [f"{count:>6} with other data ({note})" for note, count in notes.items()]
    lines += ["", *(f"{mark} {meaning}" for mark, meaning in MEANINGS.items()), ""]
    for model, group in groupby(verdict.claims, lambda answered: answered.model):
        answers = list(group)
        if model:
            lines += ["", f"of {model}, which is no model of the paper, {tally(answers)}", ""]
        for answered in answers:
            mark = MARKS[answered.answer] + "*" * bool(answered.few_draws)
            answer = ", ".join(filter(None, [answered.answer, answered.few_draws]))
            lines += [f"{mark:<2} {answered.claim.says}", f"    {answered.counts}: {answer}"]
            why = "too close" if answered.answer == "undecided" else "against it"
            lines += [f"        {why}: {comparison}" for comparison in answered.open_or_false]
            if answered.errata:
                lines.append(f"    contradicted by the paper itself: {answered.errata}")
    failures = [_describe(judgement) for judgement in verdict.cells if judgement.word in OUTSIDE]
    return "\n".join([*lines, *([""] * bool(failures)), *failures, ""])


def tally(answers: Iterable[Answered]) -> str:
    """How many claims got which answer."""
    asked = list(answers)
    words = Counter(answered.answer.removesuffix(" so far") for answered in asked)
    forms = {"holds": "hold", "fails": "fail"}
    counts = [
        f"{words[word]} {forms.get(word, word)}"
        for word in ("holds", "fails", "undecided", "not measured")
    ]
    few = sum(bool(answered.few_draws) for answered in asked)
    remark = f"; {few} of them decided by fewer than {SEEDS} draws" if few else ""
    return f"{len(asked)} claim{'s' * (len(asked) != 1)}: {', '.join(counts)}{remark}"


def count_words(judgements: Sequence[Judgement]) -> list[str]:
    """How many numbers could have failed, and how many got which word; a line each."""
    words = Counter(judgement.word for judgement in judgements)
    decided, blunt = sum(words[word] for word in DECIDED), sum(j.why == BLUNT for j in judgements)
    remarks = {"reproduced": f", of {blunt} {BLUNT}" if blunt else ""}
    return [
        f"{len(judgements)} numbers of the paper, {decided} of them decided here: they could fail",
        *(f"{words[word]:>6} {word}{remarks.get(word, '')}" for word in get_args(Word)),
    ]


def _describe(judgement: Judgement) -> str:
    name = " ".join(str(part) for part in judgement.key._replace(eps="") if part)
    remarks = "".join(f" ({text})" for text in (judgement.errata, judgement.note) if text)
    return (
        f"{judgement.table}: {name}: {judgement.word}, off by {judgement.difference:+.4g}, "
        f"tolerance {judgement.tolerance:.4g}{remarks}"
    )
