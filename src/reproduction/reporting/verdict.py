"""The verdict: every number that the paper prints, next to ours, and one of seven words.

Ours is that with eps kept, as the paper's code leaves it (`reproduction.config.section.Eps`).

Inside means |ours - paper's| <= tolerance. What can make two right numbers differ is in the
tolerance, and nothing else:

    t s sqrt(1 + 1/n)  s is the standard deviation over our n seeds. Ours is the mean of n draws,
                       the paper's is one more draw, so their difference has the standard deviation
                       s sqrt(1 + 1/n). Three seeds say little about s: t, Student's for n - 1
                       degrees of freedom, makes up for that. One right number in a hundred is
                       outside by chance
    documents          only where ours are not the paper's (`note`): twice the standard error of the
                       difference of two samples. Otherwise both runs scored the same documents, and
                       which ones those are makes no difference. Timings have that of their repeats
    half a digit       the paper's rounding
    NUMERICAL          kernels in bf16 and versions of libraries

Whether a number can be judged depends on what it took to get it, not on how it came out. Chance is
in the selection of channels (random, or by calibration text), in recovery, in pretraining and in
timings. The first line that applies gives the word:

1. not attempted            we have no number; the reason is given
2. undecided                ours was measured under another protocol than the paper's, or the
                            paper's other numbers contradict it (an erratum of kind `value`)
3. agrees, one draw         there is chance, with fewer than three draws: inside or outside, but the
   disagrees, one draw      tolerance lacks how much other draws would vary
4. reproduced               inside; it says so where the paper's number of the unpruned model is
                            inside too, since this tolerance cannot tell the two apart
5. direction only           outside, but on the paper's side of the unpruned model, in both by more
                            than the tolerance
6. differs                  outside

4 to 6 are decided; 5 and 6 are failures: `verify` reports them.
"""

from __future__ import annotations

import csv
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pandas as pd

from reproduction.config import BASELINE, Config
from reproduction.config.evaluation import FRACTIONS
from reproduction.reporting.claims import Answered, Claim, answer_all, has_few_seeds, read_claims
from reproduction.reporting.frame import (
    SEEDS,
    Cell,
    Key,
    Printed,
    cells,
    check_count,
    published_name,
    read_frame,
    read_key,
    read_published,
)
from statecut.errors import InputError
from statecut.files import atomic_write

logger = logging.getLogger(__name__)

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
NUMERICAL = 0.002
"""The numerical margin: of a perplexity or a timing this part, of an accuracy in percent this part
of 100. The same weights in bf16 through a GPU's kernels and through plain PyTorch have perplexities
that differ by up to 0.13 %, and accuracies by one question of 200 (docs/measured.md). The smallest
task of the paper has 1,100 questions; of that many, chance moves sqrt(200 / 1,100) of that part,
which is 0.2 points."""
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
            Erratum(
                row["id"], row["kind"], row["table"], read_key(row), row["printed"], row["follows"]
            )
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
    said = f"run {config.run} {' and '.join(reasons)}: it compares claims only, not cells"
    return said if reasons else ""


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
    frames: Mapping[str, pd.DataFrame],
    published: Iterable[Printed],
    errata: Iterable[Erratum] = (),
) -> list[Judgement]:
    """A word for every printed number, from the frames of the tables, by table."""
    if reason := claims_only(config):
        raise InputError(reason)
    ours = {table: cells(frame) for table, frame in frames.items()}
    published = list(published)
    unpruned = {
        _subject(printed): printed for printed in published if printed.key.method == BASELINE
    }
    by_cell: dict[tuple[str, Key], list[Erratum]] = {}
    for erratum in errata:
        by_cell.setdefault((erratum.table, erratum.key), []).append(erratum)
    judgements = []
    for printed in published:
        measured = ours.get(printed.table, {})
        cell, errors = measured.get(printed.key), by_cell.get((printed.table, printed.key), [])
        word, why = _word(config, printed, unpruned[_subject(printed)], measured, errors)
        value = cell.value if cell else None
        judgements.append(
            Judgement(
                printed.table,
                printed.key,
                ours=value,
                paper=printed.value,
                difference=None if value is None else value - printed.value,
                tolerance=tolerance(config, cell, printed) if cell and value is not None else None,
                seeds=cell.seeds if cell else 0,
                word=word,
                why=why,
                errata="; ".join(f"{e.id}: {e.printed} -> {e.follows}" for e in errors),
                note=cell.note if cell else "",
            )
        )
    return judgements


def _word(
    config: Config,
    printed: Printed,
    baseline: Printed,
    measured: Mapping[Key, Cell],
    errata: Sequence[Erratum],
) -> tuple[Word, str]:
    ours = measured.get(printed.key)
    if ours is None or ours.value is None:
        return "not attempted", ours.reason if ours else "no such table in this run"
    if protocols := ours.protocols - {"paper"}:
        return "undecided", f"measured under protocol {', '.join(sorted(protocols))}"
    if ids := [erratum.id for erratum in errata if erratum.kind == "value"]:
        return "undecided", f"the paper's own numbers contradict it ({', '.join(ids)})"
    limit = tolerance(config, ours, printed)
    inside = is_inside(ours.value - printed.value, limit)
    if few := too_few_draws(config, printed.key, ours.seeds):
        return ("agrees, one draw" if inside else "disagrees, one draw"), few
    if inside:
        blunt = printed.key != baseline.key and is_inside(baseline.value - printed.value, limit)
        return "reproduced", BLUNT if blunt else ""
    if _same_direction(config, printed, baseline, ours, measured.get(baseline.key)):
        return "direction only", ""
    return "differs", ""


def tolerance(config: Config, ours: Cell, printed: Printed) -> float:
    """How far ours may be from the paper's number; unknown parts count as zero."""
    seeds = documents = 0.0
    if ours.spread is not None:
        student = STUDENT[min(ours.seeds - 1, len(STUDENT)) - 1]
        seeds = student * ours.spread * math.sqrt(1 + 1 / ours.seeds)
    if printed.key.head_k_dim is not None or ours.note:
        documents = 2 * math.sqrt(2) * (ours.stderr or 0.0)
    size = 100.0 if _is_accuracy(config, printed.key.metric) else abs(printed.value)
    return math.hypot(seeds, documents) + printed.digit / 2 + NUMERICAL * size


def _is_accuracy(config: Config, metric: str) -> bool:
    """A column in percent, or a mean of such columns."""
    suites = config.evaluation.suites.values()
    return any(
        suite.tasks[metric].metric in FRACTIONS if metric in suite.tasks else metric == suite.mean
        for suite in suites
    )


def is_inside(difference: float, tolerance: float) -> bool:
    """Also a difference of exactly half a printed digit, whatever floating point makes of it."""
    return abs(difference) <= tolerance * (1 + 1e-9)


def _subject(printed: Printed) -> tuple[str, str, str, str]:
    return printed.table, printed.key.model, printed.key.conv_sharing, printed.key.metric


def too_few_draws(config: Config, key: Key, seeds: int) -> str:
    """The random step behind a number that was drawn too seldom to judge it; empty if none was.

    A run trains and times everything once; its seeds are draws of selections and recoveries.
    """
    if key.head_k_dim is not None:  # a benchmark
        return "" if key.metric in CONSTANT else "timed once"
    if any(
        published_name(config, name) == (key.model, key.conv_sharing)
        and model.source.kind == "pretrain"
        for name, model in config.models.items()
    ):
        return "pretrained once"
    return f"{seeds} of at least {SEEDS} seeds" if has_few_seeds(config, key, seeds) else ""


def _same_direction(
    config: Config, printed: Printed, base: Printed, ours: Cell, our_base: Cell | None
) -> bool:
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
    cells: tuple[Judgement, ...]
    claims: tuple[Answered, ...]


def reach_verdict(
    config: Config,
    frames: Mapping[str, pd.DataFrame],
    published: Iterable[Printed],
    errata: Iterable[Erratum],
    claims: Iterable[Claim],
) -> PaperVerdict:
    """From the frames of a run's tables, by table."""
    scope = claims_only(config)
    judgements = () if scope else judge(config, frames, published, errata)
    ours = {key: cell for frame in frames.values() for key, cell in cells(frame).items()}
    answers = tuple(answer_all(config, claims, ours))
    return PaperVerdict(scope, tuple(judgements), answers)


def make_verdict(
    config: Config,
    frames: Sequence[Path | str],
    out: Path | str,
    published: Path | str,
    claims: Path | str,
) -> None:
    """cells.csv, claims.csv and verdict.txt in a folder, from the frames of all tables in order.

    `published` is the folder of the paper's numbers and errata.
    """
    check_count(f"the verdict of {config.run}", "frames", len(config.tables), len(frames))
    verdict = reach_verdict(
        config,
        dict(zip(config.tables, map(read_frame, frames), strict=True)),
        read_published(Path(published) / "values.csv"),
        read_errata(Path(published) / "errata.csv"),
        read_claims(claims),
    )
    write_verdict(verdict, out)


def write_verdict(verdict: PaperVerdict, folder: Path | str) -> None:
    cells = pd.DataFrame(
        [(judgement.table, *judgement.key, *judgement[2:]) for judgement in verdict.cells],
        columns=["table", *Key._fields, *Judgement._fields[2:]],
    )
    claims = pd.DataFrame(
        {
            "model": answered.model,
            "id": answered.claim.id,
            "about": answered.claim.about,
            "says": answered.claim.says,
            "place": answered.claim.place,
            "answer": answered.answer,
            "numbers": answered.numbers,
            "errata": answered.errata,
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
    """The verdict to be read: claims, how many numbers got which word, and those outside."""
    lines, model = [], ""
    for answered in verdict.claims:
        if answered.model != model:
            model = answered.model
            lines += ["", f"the same, asked of {model}, which is no model of the paper", ""]
        lines += [answered.claim.says, f"    {answered.counts}: {answered.answer}"]
        lines += [f"        against it: {comparison}" for comparison in answered.false]
        if answered.errata:
            lines.append(f"    contradicted by the paper itself: {answered.errata}")
    if verdict.scope:
        return "\n".join([*lines, "", verdict.scope, ""])
    notes = Counter(judgement.note for judgement in verdict.cells if judgement.note)
    lines += ["", *count_words(verdict.cells)]
    lines += [f"{count:>6} with other data ({note})" for note, count in notes.items()]
    return "\n".join([*lines, *map(_describe, outside(verdict.cells)), ""])


def count_words(judgements: Sequence[Judgement]) -> list[str]:
    """How many numbers could have failed, and how many got which word; a line each."""
    words = Counter(judgement.word for judgement in judgements)
    decided, blunt = sum(words[word] for word in DECIDED), sum(j.why == BLUNT for j in judgements)
    remarks = {"reproduced": f", of {blunt} {BLUNT}" if blunt else ""}
    return [
        f"{len(judgements)} numbers of the paper, {decided} of them decided here: they could fail",
        *(f"{words[word]:>6} {word}{remarks.get(word, '')}" for word in get_args(Word)),
    ]


def outside(judgements: Iterable[Judgement]) -> list[Judgement]:
    return [judgement for judgement in judgements if judgement.word in OUTSIDE]


def _describe(judgement: Judgement) -> str:
    name = " ".join(str(part) for part in judgement.key._replace(eps="") if part)
    remarks = "".join(f" ({text})" for text in (judgement.errata, judgement.note) if text)
    return (
        f"{judgement.table}: {name}: {judgement.word}, off by {judgement.difference:+.4g}, "
        f"tolerance {judgement.tolerance:.4g}{remarks}"
    )


def read_judgements(path: Path | str) -> list[Judgement]:
    """From the cells.csv that `make_verdict` wrote."""

    def read(row: dict[str, str]) -> Judgement:
        fields = {name: row[name] for name in Judgement._fields if name != "key"}
        numbers = ("ours", "paper", "difference", "tolerance")
        read_as = {name: float(row[name]) if row[name] else None for name in numbers}
        return Judgement(**fields | read_as | {"key": read_key(row), "seeds": int(row["seeds"])})  # type: ignore[arg-type]

    with open(path, newline="") as file:
        return [read(row) for row in csv.DictReader(file)]


def verify(cells: Path | str) -> None:
    """Fail if a number in the cells.csv of a verdict is outside its tolerance, and decided."""
    judgements = read_judgements(cells)
    for line in count_words(judgements) if judgements else ["this run compares claims only"]:
        logger.info(line)
    failures = outside(judgements)
    if failures:
        lines = [f"{len(failures)} numbers are outside:", *map(_describe, failures[:10])]
        if len(failures) > 10:
            lines.append(f"and {len(failures) - 10} more")
        raise InputError("\n".join(lines))
