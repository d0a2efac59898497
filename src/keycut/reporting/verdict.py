"""The verdict: every number that the paper prints, beside ours, and one of five words.

Inside means |ours - paper's| <= tolerance = 2 sqrt(stderr² + spread²) + half a printed digit, where
`spread` is the standard deviation over seeds and `stderr` the error of one evaluation; unknown ones
count as zero. For a mean, stderr is propagated from its tasks (`keycut.reporting.frame`). The first
line that applies gives the word:

1. not attempted   we have no number; the reason is given
2. undecided       ours was measured under another protocol than the paper's
3. undecided       the method is random (channels, rows, calibration text), with fewer than three
                   seeds
4. reproduced      inside; it says so where the paper's number of the unpruned model is inside too,
                   since this tolerance cannot tell the two apart
5. undecided       outside, but the paper's number contradicts the paper's other numbers (an erratum
                   of kind `value`), or the model was pretrained, recovered or timed here only once:
                   the tolerance does not include how much that varies
6. direction only  outside, but on the paper's side of the unpruned model, in both by more than the
                   uncertainty
7. differs         outside

6 and 7 are failures: `verify` reports them.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pandas as pd

from keycut.artefact import atomic_write
from keycut.config import BASELINE, Config
from keycut.errors import InputError
from keycut.reporting.claims import Answered, Claim, answer_all, read_claims
from keycut.reporting.frame import (
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

Word = Literal["reproduced", "direction only", "differs", "undecided", "not attempted"]
OUTSIDE: tuple[Word, ...] = ("direction only", "differs")
BLUNT = "the paper's number of the unpruned model is inside too"
"""The error of a perplexity is that of the sample of documents, which is large, although the paper
has the same documents."""
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
    experiment, also where names and widths happen to agree.
    """
    protocol = config.evaluation.protocol
    if protocol == "paper":
        return ""
    return f"run {config.run} has protocol {protocol}: it compares claims only, not cells"


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
                tolerance=tolerance(cell, printed) if cell and value is not None else None,
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
    method = config.methods.get(printed.key.method)
    if method and method.drawn and ours.seeds < SEEDS:
        return "undecided", f"{ours.seeds} of at least {SEEDS} seeds"
    limit = tolerance(ours, printed)
    if is_inside(ours.value - printed.value, limit):
        blunt = printed.key != baseline.key and is_inside(baseline.value - printed.value, limit)
        return "reproduced", BLUNT if blunt else ""
    if ids := [erratum.id for erratum in errata if erratum.kind == "value"]:
        return "undecided", f"the paper's own numbers contradict it ({', '.join(ids)})"
    if once := _done_once(config, printed.key, ours):
        return "undecided", f"{once} once: the spread of that is not known"
    if _same_direction(printed, baseline, ours, measured.get(baseline.key)):
        return "direction only", ""
    return "differs", ""


def tolerance(ours: Cell, printed: Printed) -> float:
    return 2 * ours.noise + printed.digit / 2


def is_inside(difference: float, tolerance: float) -> bool:
    """Also a difference of exactly half a printed digit, whatever floating point makes of it."""
    return abs(difference) <= tolerance * (1 + 1e-9)


def _subject(printed: Printed) -> tuple[str, str, str, str]:
    return printed.table, printed.key.model, printed.key.conv_sharing, printed.key.metric


def _done_once(config: Config, key: Key, ours: Cell) -> str:
    """The random step behind a number that was done only once; empty if there is none."""
    if key.head_k_dim is not None:  # a benchmark
        return "" if key.metric in CONSTANT else "timed"
    if any(
        published_name(config, name) == (key.model, key.conv_sharing)
        and model.source.kind == "pretrain"
        for name, model in config.models.items()
    ):
        return "pretrained"
    return "recovered" if key.rft == "post" and ours.seeds < SEEDS else ""


def _same_direction(printed: Printed, base: Printed, ours: Cell, our_base: Cell | None) -> bool:
    if printed.key == base.key or our_base is None or our_base.value is None or ours.value is None:
        return False
    theirs, mine = printed.value - base.value, ours.value - our_base.value
    clear = abs(theirs) > (printed.digit + base.digit) / 2 and abs(mine) > 2 * math.hypot(
        ours.noise, our_base.noise
    )
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
        lines += [f"{answered.answer:<12} {answered.claim.says}", f"{'':12} {answered.numbers}"]
        if answered.errata:
            lines.append(f"{'':12} contradicted by the paper itself: {answered.errata}")
    if verdict.scope:
        return "\n".join([*lines, "", verdict.scope, ""])
    lines += ["", f"{len(verdict.cells)} numbers of the paper"]
    words = Counter(judgement.word for judgement in verdict.cells)
    blunt = sum(judgement.why == BLUNT for judgement in verdict.cells)
    remarks = {"reproduced": f", of {blunt} {BLUNT}" if blunt else ""}
    lines += [f"{words[word]:>6} {word}{remarks.get(word, '')}" for word in get_args(Word)]
    notes = Counter(judgement.note for judgement in verdict.cells if judgement.note)
    lines += [f"{count:>6} with other data ({note})" for note, count in notes.items()]
    return "\n".join([*lines, *map(_describe, outside(verdict.cells)), ""])


def outside(judgements: Iterable[Judgement]) -> list[Judgement]:
    return [judgement for judgement in judgements if judgement.word in OUTSIDE]


def _describe(judgement: Judgement) -> str:
    name = " ".join(str(part) for part in judgement.key if part)
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
    failures = outside(read_judgements(cells))
    if failures:
        lines = [f"{len(failures)} numbers are outside:", *map(_describe, failures[:10])]
        if len(failures) > 10:
            lines.append(f"and {len(failures) - 10} more")
        raise InputError("\n".join(lines))
