"""What every kind of table is made of: boxes in lines, numbers as text, marks and notes.

- Equal values are marked alike. Second is the next value that is really worse, also after a tied
  best: three rows may be marked best and two second.
- Marks compare pruning methods with each other, at one model, ratio and stage; the baseline takes
  no part. A group with one value is not marked. Values that are missing are left out of it.
- Tables of kind by_ratio, by_model and summary mark every column; breakdowns only perplexities and
  means; others none. So does the paper.
- More than one seed gives mean ± standard deviation. A missing cell is a dash, with the reason
  below the table. Rows measured under another protocol than `paper` say so, and cells whose task
  has its data from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import pandas as pd

from keycut.config import (
    BASELINE,
    Config,
    DecodingTable,
    Measurement,
    QualityTable,
    SpeedTable,
    Stage,
    Variant,
)
from keycut.errors import InputError
from keycut.reporting.frame import Cell, Key, cells, timing_key, variant_key

T = TypeVar("T")
Form = Callable[[float], str]
Mark = Literal["", "best", "second"]
Above = Literal["", "space", "rule"]

DASH = "–"
MARKED_KINDS = {"by_ratio", "by_model", "summary", "breakdown"}
LOWER_IS_BETTER = {"word_perplexity", "perplexity", "byte_perplexity", "bits_per_byte"}
MEASURES = {"word_perplexity": "ppl", "perplexity": "ppl", "acc_norm": "acc_n", "contains": "cont."}


@dataclass(frozen=True)
class Box:
    """One box of a table: a label if it has no key, else a number or the dash for a missing one."""

    text: str = ""
    span: int = 1
    mark: Mark = ""
    notes: tuple[str, ...] = ()
    key: Key | None = None


@dataclass(frozen=True)
class Line:
    boxes: tuple[Box, ...]
    above: Above = ""


@dataclass(frozen=True)
class Grid:
    """A table, before it is written in any language."""

    name: str
    kind: str
    caption: str
    groups: tuple[int, ...]  # columns that belong together; the first group are the labels
    heads: tuple[Line, ...]
    lines: tuple[Line, ...]
    notes: tuple[tuple[str, str], ...]  # letter and text; no letter: about all of it


# --- numbers ---


def marks(values: Mapping[T, float], *, lower: bool) -> dict[T, Mark]:
    """Best and second by value. Ties share a mark, and second is the next value after the best."""
    ranked = sorted(set(values.values()), reverse=not lower)
    if len(values) < 2:
        return {}
    names: dict[float, Mark] = dict(zip(ranked, ("best", "second"), strict=False))
    return {name: names[value] for name, value in values.items() if value in names}


def fixed(decimals: int, scale: float = 1.0, unit: str = "") -> Form:
    return lambda value: f"{value / scale:.{decimals}f}{unit}"


def one_decimal(value: float) -> str:
    return f"{value:.1f}"


def rotated(value: float) -> str:
    """Two decimals, or two digits and a power of ten where a rotation broke the model."""
    if abs(value) < 1e4:
        return f"{value:.2f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def spread_beside(text: str, spread: float, form: Form) -> str:
    """The spread of a number, with the power of ten that the number is written with."""
    _, power, exponent = text.partition("e")
    return f"{spread / 10 ** int(exponent):.2f}e{exponent}" if power else form(spread)


def throughput(value: float) -> str:
    """Tokens per second in millions, or in what suits a slower machine."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.1f}"


def percent(ratio: float) -> str:
    return f"{100 * ratio:g}%"


# --- laying out ---


class Layout:
    """What the kinds of tables share while one is laid out: numbers, marks and notes."""

    def __init__(self, config: Config, name: str, frame: pd.DataFrame) -> None:
        self.config, self.name = config, name
        self.table = config.tables[name]
        self.cells = cells(frame)
        self.letters: dict[str, str] = {}
        self.marks = self._marks() if self.table.kind in MARKED_KINDS else {}

    def number(self, key: Key, form: Form = one_decimal, span: int = 1) -> Box:
        cell = self.cells.get(key)
        if cell is None:
            raise InputError(f"table {self.name}: the frame has no row for {describe(key)}")
        notes = tuple(self.letter(text) for text in (cell.reason, cell.note) if text)
        if cell.value is None:
            return Box(DASH, span, "", notes, key)
        text = form(cell.value)
        if cell.spread is not None:
            text += f" ± {spread_beside(text, cell.spread, form)}"
        return Box(text, span, self.marks.get(key, ""), notes, key)

    def letter(self, note: str) -> str:
        number = len(self.letters)
        new = chr(ord("a") + number % 26) * (1 + number // 26)
        return self.letters.setdefault(note, new)

    def grid(self, groups: Sequence[int], heads: Iterable[Line], lines: Iterable[Line]) -> Grid:
        lines = tuple(lines)
        said = [self._protocol(line) for line in lines]
        general: list[tuple[str, str]] = []
        of_measured = {note for line, note in zip(lines, said, strict=True) if self._measured(line)}
        if len(of_measured) == 1:
            general = [("", note) for note in of_measured if note]
        else:
            lines = tuple(self._noted(*one) for one in zip(lines, said, strict=True))
        notes = [*general, *((letter, text) for text, letter in self.letters.items())]
        table = self.table
        return Grid(
            self.name, table.kind, table.caption, tuple(groups), tuple(heads), lines, tuple(notes)
        )

    def _measured(self, line: Line) -> list[Cell]:
        there = [self.cells[box.key] for box in line.boxes if box.key]
        return [cell for cell in there if cell.value is not None]

    def _protocol(self, line: Line) -> str:
        """What a line says of protocols other than the paper's, or nothing."""
        named = {name for cell in self._measured(line) for name in cell.protocols} - {"paper"}
        return f"protocol {', '.join(sorted(named))}, not the paper's" if named else ""

    def _noted(self, line: Line, note: str) -> Line:
        """The line with a note on its first label that says anything."""
        if not note:
            return line
        at = next(i for i, box in enumerate(line.boxes) if box.text and not box.key)
        box = line.boxes[at]
        noted = replace(box, notes=(*box.notes, self.letter(note)))
        return replace(line, boxes=(*line.boxes[:at], noted, *line.boxes[at + 1 :]))

    def _marks(self) -> dict[Key, Mark]:
        """Methods against each other, wherever everything else is the same."""
        groups: dict[Key, dict[Key, float]] = {}
        for key, cell in self.cells.items():
            if key.method != BASELINE and cell.value is not None and self._is_marked(key.metric):
                group = key._replace(method="", target="")
                groups.setdefault(group, {})[key] = cell.value
        found: dict[Key, Mark] = {}
        for group, values in groups.items():
            found |= marks(values, lower=lower_is_better(self.config, group.metric))
        return found

    def _is_marked(self, metric: str) -> bool:
        if self.table.kind != "breakdown":
            return True
        suite = self.config.evaluation.suites[self.config.suite_of(metric)]
        return metric == suite.mean or lower_is_better(self.config, metric)


class Variants(Layout):
    """A table of evaluated variants."""

    table: QualityTable

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self.table.columns)

    def columns(self, stage: Stage) -> tuple[str, ...]:
        return self.config.columns(self.name, stage)

    def key(
        self, model: str, method: str, ratio: float, rft: Stage, metric: str, target: str = ""
    ) -> Key:
        if method != BASELINE:
            target = target or self.config.methods[method].target
        variant = Variant(model, method, target, ratio, 0, rft)
        return variant_key(self.config, variant, metric)

    def baselines(self) -> Iterator[tuple[str, Stage]]:
        """The model left whole; and recovered like the others, where the run has that control."""
        yield "Baseline", "none"
        if "post" in self.stages and self.config.recovery and self.config.recovery.control:
            yield "Baseline, recovered", "post"

    def whole(self, model: str, rft: Stage, metric: str) -> Key:
        return self.key(model, BASELINE, 0.0, rft, metric)

    def numbers(self, keys: Iterable[Key]) -> tuple[Box, ...]:
        return tuple(self.number(key) for key in keys)

    def label(self, method: str) -> Box:
        return Box(self.config.methods[method].label)

    def head(self, metric: str) -> Box:
        """A column's heading in one line: its name and which way is better."""
        suite = self.config.evaluation.suites[self.config.suite_of(metric)]
        name = suite.label if metric == suite.mean else suite.tasks[metric].label
        return Box(f"{name} {self._arrow(metric)}")

    def heads(self, metrics: Iterable[str]) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
        """Headings in two lines: the task, then what is measured."""
        names, measures = [], []
        for metric in metrics:
            suite = self.config.evaluation.suites[self.config.suite_of(metric)]
            mean = metric == suite.mean
            names.append(Box("Avg" if mean else suite.tasks[metric].label))
            measure = "" if mean else suite.tasks[metric].metric
            measures.append(Box(f"{MEASURES.get(measure, measure)} {self._arrow(metric)}".strip()))
        return tuple(names), tuple(measures)

    def by_suite(self, metrics: Sequence[str]) -> list[int]:
        """How many neighbouring columns belong to one suite, means apart."""
        groups: list[tuple[tuple[str, bool], int]] = []
        for metric in metrics:
            suite = self.config.suite_of(metric)
            group = (suite, metric == self.config.evaluation.suites[suite].mean)
            if groups and groups[-1][0] == group:
                groups[-1] = (group, groups[-1][1] + 1)
            else:
                groups.append((group, 1))
        return [size for _, size in groups]

    def _arrow(self, metric: str) -> str:
        return "↓" if lower_is_better(self.config, metric) else "↑"


def lower_is_better(config: Config, metric: str) -> bool:
    suite = config.evaluation.suites[config.suite_of(metric)]
    return metric in suite.tasks and suite.tasks[metric].metric in LOWER_IS_BETTER


class Timings(Layout):
    """A table of a benchmark."""

    table: SpeedTable | DecodingTable

    @property
    def does(self) -> str:
        return "decoding" if isinstance(self.table, DecodingTable) else self.table.shows

    def by_subject(self) -> dict[str, list[Measurement]]:
        found: dict[str, list[Measurement]] = {}
        for cell in self.config.measurements(self.table.benchmark):
            if cell.does == self.does:
                found.setdefault(cell.subject, []).append(cell)
        return found

    def at(self, cell: Measurement, metric: str, form: Form) -> Box:
        return self.number(timing_key(self.config, cell, metric), form)


def describe(key: Key) -> str:
    return ", ".join(f"{name} {value}" for name, value in key._asdict().items() if value)
