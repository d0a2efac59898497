"""The verdict: every number that the paper prints, beside ours, and one of five words.

Inside means |ours - paper's| <= tolerance = 2 sqrt(stderr² + spread²) + half a printed digit, where
`spread` is the standard deviation over seeds and `stderr` the error of one evaluation; what is not
known of them counts as zero. For a mean, stderr is that of its tasks, propagated
(`keycut.reporting.frame`). The first line that applies gives the word:

1. not attempted   there is no number of ours; the reason stands beside it
2. undecided       ours was measured under another protocol than the paper's
3. undecided       the method draws (channels, rows, calibration text), and fewer than three seeds
                   say how much that matters
4. reproduced      inside; where the paper's number of the unpruned model is inside too, it says so,
                   since this tolerance could not have told the two apart
5. undecided       outside, but the paper's number contradicts the paper's other numbers (an erratum
                   of kind `value`), or the model was pretrained, recovered or timed here once, and
                   how much another time would differ is not known: the tolerance is too small by
                   that
6. direction only  outside, but on the paper's side of the unpruned model, in both by more than is
                   uncertain
7. differs         outside

Words 4, 6 and 7 are decided, and 6 and 7 are outside: `verify` fails on them.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pandas as pd

from keycut.artefact import atomic_write
from keycut.config import BASELINE, Config
from keycut.errors import InputError
from keycut.reporting.claims import Answered, Claim, answer
from keycut.reporting.frame import SEEDS, Cell, Key, Printed, cells, identity, read_key

Word = Literal["reproduced", "direction only", "differs", "undecided", "not attempted"]
OUTSIDE: tuple[Word, ...] = ("direction only", "differs")
BLUNT = "the paper's number of the unpruned model is inside too"
"""What is said of a tolerance that could not have told the two apart: the error of an evaluation is
that of the draw of its documents, which for perplexities is large, and the paper drew the same."""
SIZES = ("peak_memory_gib", "memory_ratio")
"""What a benchmark finds that is the same each time."""


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


def comparable(config: Config) -> str:
    """Why a run can be held to the paper's claims only, or nothing if its cells compare too.

    The protocol `paper` promises the paper's settings; a run under another one is another
    experiment, also where names and widths happen to agree.
    """
    protocol = config.evaluation.protocol
    if protocol == "paper":
        return ""
    return f"run {config.run} has protocol {protocol}: it compares claims only, not cells"


@dataclass(frozen=True)
class Judged:
    """One printed number and what became of it."""

    printed: Printed
    ours: Cell | None
    word: Word
    why: str
    errata: tuple[Erratum, ...]

    @property
    def difference(self) -> float | None:
        if self.ours is None or self.ours.value is None:
            return None
        return self.ours.value - self.printed.value

    @property
    def tolerance(self) -> float | None:
        if self.ours is None or self.ours.value is None:
            return None
        return tolerance(self.ours, self.printed)


def tolerance(ours: Cell, printed: Printed) -> float:
    return 2 * ours.noise + printed.digit / 2


def judge(
    config: Config,
    frames: Mapping[str, pd.DataFrame],
    published: Iterable[Printed],
    errata: Iterable[Erratum] = (),
) -> list[Judged]:
    """A word for every printed number, from the frames of the tables, by table."""
    if why := comparable(config):
        raise InputError(why)
    ours = {table: cells(frame) for table, frame in frames.items()}
    published = list(published)
    left_whole = {_subject(one): one for one in published if one.key.method == BASELINE}
    touching: dict[tuple[str, Key], list[Erratum]] = {}
    for erratum in errata:
        touching.setdefault((erratum.table, erratum.key), []).append(erratum)
    judged = []
    for printed in published:
        there = ours.get(printed.table, {})
        reference = left_whole[_subject(printed)]
        found = tuple(touching.get((printed.table, printed.key), ()))
        word, why = _word(config, printed, reference, there, found)
        judged.append(Judged(printed, there.get(printed.key), word, why, found))
    return judged


def _word(
    config: Config,
    printed: Printed,
    reference: Printed,
    there: Mapping[Key, Cell],
    errata: tuple[Erratum, ...],
) -> tuple[Word, str]:
    ours = there.get(printed.key)
    if ours is None or ours.value is None:
        return "not attempted", ours.reason if ours else "no such table in this run"
    if others := ours.protocols - {"paper"}:
        return "undecided", f"measured under protocol {', '.join(sorted(others))}"
    method = config.methods.get(printed.key.method)
    if method and method.drawn and ours.seeds < SEEDS:
        return "undecided", f"{ours.seeds} of at least {SEEDS} seeds"
    # Both numbers have few digits, and a difference of exactly half of one is inside.
    if _inside(ours.value, ours, printed):
        blunt = printed.key != reference.key and _inside(reference.value, ours, printed)
        return "reproduced", BLUNT if blunt else ""
    if slips := [erratum.id for erratum in errata if erratum.kind == "value"]:
        return "undecided", f"the paper's own numbers contradict it ({', '.join(slips)})"
    if once := _done_once(config, printed.key, ours):
        return "undecided", f"{once} once: the spread of that is not known"
    if _same_direction(printed, reference, ours, there.get(reference.key)):
        return "direction only", ""
    return "differs", ""


def _inside(value: float, ours: Cell, printed: Printed) -> bool:
    return abs(value - printed.value) <= tolerance(ours, printed) * (1 + 1e-9)


def _subject(printed: Printed) -> tuple[str, str, str, str]:
    return printed.table, printed.key.model, printed.key.conv_sharing, printed.key.metric


def _done_once(config: Config, key: Key, ours: Cell) -> str:
    """What of a number is drawn, but was done one time only; nothing if there is no such thing."""
    if key.head_k_dim is not None:  # a timing: it depends on shapes alone, and on chance
        return "" if key.metric in SIZES else "timed"
    if any(
        identity(config, name) == (key.model, key.conv_sharing) and model.source.kind == "pretrain"
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
class Verdict:
    """What a run says of the paper: its cells, where they compare, and its claims."""

    scope: str  # why cells do not compare, or nothing
    cells: tuple[Judged, ...]
    claims: tuple[Answered, ...]


def reach_verdict(
    config: Config,
    frames: Mapping[str, pd.DataFrame],
    published: Iterable[Printed],
    errata: Iterable[Erratum],
    claims: Iterable[Claim],
) -> Verdict:
    """From the frames of a run's tables, by table."""
    scope = comparable(config)
    judged = () if scope else judge(config, frames, published, errata)
    ours = {key: cell for frame in frames.values() for key, cell in cells(frame).items()}
    return Verdict(scope, tuple(judged), tuple(answer(config, claim, ours) for claim in claims))


class Line(NamedTuple):
    """A number that the paper prints, ours beside it, and its word: a line of cells.csv."""

    table: str
    key: Key
    ours: float | None
    paper: float
    difference: float | None
    tolerance: float | None
    seeds: int
    word: str
    why: str
    errata: str
    note: str = ""  # where its task's data is not from the hub's main branch


def lines(verdict: Verdict) -> list[Line]:
    return [
        Line(
            one.printed.table,
            one.printed.key,
            one.ours.value if one.ours else None,
            one.printed.value,
            one.difference,
            one.tolerance,
            one.ours.seeds if one.ours else 0,
            one.word,
            one.why,
            "; ".join(f"{e.id}: {e.printed} -> {e.follows}" for e in one.errata),
            one.ours.note if one.ours else "",
        )
        for one in verdict.cells
    ]


def read_lines(path: Path | str) -> list[Line]:
    """From the cells.csv that `write_verdict` wrote."""
    with open(path, newline="") as file:
        return [_read_line(row) for row in csv.DictReader(file)]


def _read_line(row: dict[str, str]) -> Line:
    ours, difference, tolerance = (
        float(row[name]) if row[name] else None for name in ("ours", "difference", "tolerance")
    )
    paper, seeds = float(row["paper"]), int(row["seeds"])
    rest = (row[name] for name in ("word", "why", "errata", "note"))
    return Line(row["table"], read_key(row), ours, paper, difference, tolerance, seeds, *rest)


def verify(judged: Iterable[Line]) -> None:
    """Fail if a decided number is outside its tolerance."""
    outside = [one for one in judged if one.word in OUTSIDE]
    if outside:
        said = [f"{len(outside)} numbers are outside:", *map(_said, outside[:10])]
        more = [f"and {len(outside) - 10} more"] if len(outside) > 10 else []
        raise InputError("\n".join([*said, *more]))


def cell_frame(verdict: Verdict) -> pd.DataFrame:
    """One line per printed number; what is ours and what is the paper's in columns of their own."""
    rows = [(one.table, *one.key, *one[2:]) for one in lines(verdict)]
    frame = pd.DataFrame(rows, columns=["table", *Key._fields, *Line._fields[2:]])
    return frame.astype({"head_k_dim": "Int64"})


def claim_frame(verdict: Verdict) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": one.claim.id,
            "says": one.claim.says,
            "place": one.claim.place,
            "answer": one.answer,
            "numbers": one.numbers,
            "errata": ", ".join(one.claim.errata),
        }
        for one in verdict.claims
    )


def to_text(verdict: Verdict) -> str:
    """The verdict to be read: claims, how many numbers got which word, and those outside."""
    said = []
    for one in verdict.claims:
        said += [f"{one.answer:<12} {one.claim.says}", f"{'':12} {one.numbers}"]
        if one.claim.errata:
            said.append(f"{'':12} contradicted by the paper itself: {', '.join(one.claim.errata)}")
    if verdict.scope:
        return "\n".join([*said, "", verdict.scope, ""])
    counts = Counter(one.word for one in verdict.cells)
    said += ["", f"{len(verdict.cells)} numbers of the paper"]
    blunt = sum(one.why == BLUNT for one in verdict.cells)
    more = {"reproduced": f", of {blunt} {BLUNT}" if blunt else ""}
    said += [f"{counts[word]:>6} {word}{more.get(word, '')}" for word in get_args(Word)]
    noted = Counter(one.ours.note for one in verdict.cells if one.ours and one.ours.note)
    said += [f"{count:>6} with other data ({note})" for note, count in noted.items()]
    said += [_said(one) for one in lines(verdict) if one.word in OUTSIDE]
    return "\n".join([*said, ""])


def write_verdict(verdict: Verdict, folder: Path | str) -> None:
    """cells.csv, claims.csv and verdict.txt in a folder."""
    for name, frame in (("cells.csv", cell_frame(verdict)), ("claims.csv", claim_frame(verdict))):
        with atomic_write(Path(folder) / name, force=True) as aside:
            frame.to_csv(aside, index=False)
    with atomic_write(Path(folder) / "verdict.txt", force=True) as aside:
        aside.write_text(to_text(verdict))


def _said(one: Line) -> str:
    named = " ".join(str(part) for part in one.key if part)
    beside = "".join(f" ({text})" for text in (one.errata, one.note) if text)
    return (
        f"{one.table}: {named}: {one.word}, off by {one.difference:+.4g}, "
        f"tolerance {one.tolerance:.4g}{beside}"
    )
