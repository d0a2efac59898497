"""What all kinds of tables share: rows of boxes, numbers as text, marks and notes.

- Equal values have equal marks. Second is the next value that is worse, also after a tied best:
  three rows may be marked best and two second. Zero is not marked, nor what is all the same.
- Marks compare pruning methods at one model, ratio and stage, without the baseline. Missing values
  are left out, and a single value is not marked.
- Tables of kind by_ratio, by_model and summary mark every column, breakdowns perplexities and means
  only, others none: as the paper does.
- Several trainings, or else seeds, give mean ± standard deviation, and a note says how many. A
  missing cell is a dash, with the reason below the table. Notes name protocols other than `paper`,
  and tasks whose data is from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal, TypeVar

from reproduction.config import (
    BASELINE,
    Config,
    Cut,
    Measurement,
    QualityTable,
    Stage,
    Variant,
)
from reproduction.config.section import RECOVERED, REFITTED
from reproduction.reporting.frame import (
    Key,
    Result,
    cells,
    lower_is_better,
    timing_key,
    variant_key,
)
from statecut.arguments import Eps

T = TypeVar("T")
Form = Callable[[float], str]
Mark = Literal["", "best", "second"]
Separator = Literal["", "space", "rule"]

DASH = "–"
STAGES: dict[Stage, str] = {
    "pre": "sliced",
    "refit": "refitted",
    "post": "recovered",
    "refit_post": "refitted and recovered",
}
MARKED_KINDS = {"by_ratio", "by_model", "summary", "breakdown"}
MEASURES = {"word_perplexity": "ppl", "perplexity": "ppl", "acc_norm": "acc_n", "contains": "cont."}


@dataclass(frozen=True)
class Box:
    """A label if it has no key, else a number, or the dash for a missing one."""

    text: str = ""
    span: int = 1  # columns
    mark: Mark = ""
    notes: tuple[str, ...] = ()  # their letters
    key: Key | None = None
    form: Form = str  # how numbers in its place are written


@dataclass(frozen=True)
class Row:
    boxes: tuple[Box, ...]
    above: Separator = ""


def row(labels: Iterable[str], boxes: Iterable[Box] = (), above: Separator = "") -> Row:
    return Row((*map(Box, labels), *boxes), above)


@dataclass(frozen=True)
class Grid:
    """The content of a table. Templates decide how it looks (`reproduction.reporting.writing`)."""

    name: str
    kind: str
    caption: str
    groups: tuple[int, ...]  # sizes of column groups; the first group holds the labels
    heads: tuple[Row, ...]
    rows: tuple[Row, ...]
    notes: tuple[tuple[str, str], ...]  # letter and text; without a letter: about the whole table

    @property
    def group_ends(self) -> list[int]:
        """Columns, counted from 1, that another group follows."""
        return [*accumulate(self.groups)][:-1]


# --- numbers ---


def marks(values: Mapping[T, float], *, lower: bool) -> dict[T, Mark]:
    """Best and second by value. Ties share a mark, and second is the next value after the best.

    Zero is no achievement, and of equal values none is better: they have no mark.
    """
    ranked = sorted(set(values.values()), reverse=not lower)
    if len(ranked) < 2:
        return {}
    names: dict[float, Mark] = dict(zip(ranked, ("best", "second"), strict=False))
    return {name: names[value] for name, value in values.items() if value and value in names}


def fixed(decimals: int, scale: float = 1.0, unit: str = "") -> Form:
    return lambda value: f"{value / scale:.{decimals}f}{unit}"


one_decimal = fixed(1)


def scientific_if_large(value: float) -> str:
    """Two decimals, or two digits and a power of ten from 10,000 on."""
    if abs(value) < 1e4:
        return f"{value:.2f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def format_spread(text: str, spread: float, form: Form) -> str:
    """The spread of a number, with the power of ten that the number is written with."""
    _, power, exponent = text.partition("e")
    return f"{spread / 10 ** int(exponent):.2f}e{exponent}" if power else form(spread)


def throughput(value: float) -> str:
    """Tokens per second, in millions or thousands if there are that many."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.1f}"


def percent(cut: Cut) -> str:
    """What was cut of the keys; or the widths of keys and values that were left."""
    return cut.replace("x", " × ") if isinstance(cut, str) else f"{100 * cut:g}%"


def _counted(counts: Iterable[int], one: str, several: str) -> Iterator[str]:
    """3 draws; 1 or 3 draws; nothing without a count."""
    if numbers := sorted(counts):
        yield f"{' or '.join(map(str, numbers))} {one if numbers[-1] == 1 else several}"


def protocol_note(protocols: Iterable[str]) -> str:
    """Names those other than the paper's; empty if there is none."""
    names = {*protocols}
    others = ", ".join(sorted(names - {"paper"}))
    part = "in part " if "paper" in names else ""
    return f"{part}protocol {others}, not the paper's" if others else ""


# --- building ---


class TableBuilder:
    """Turns the results of a table into boxes: numbers, marks and notes."""

    def __init__(self, config: Config, name: str, results: Iterable[Result]) -> None:
        self.config, self.name = config, name
        self.table: Any = config.tables[name]
        self.cells = cells(results)
        self.letters: dict[str, str] = {}
        self.marks = self._marks() if self.table.kind in MARKED_KINDS else {}

    def number(self, key: Key, form: Form = one_decimal, span: int = 1) -> Box:
        cell = self.cells[key]
        notes = tuple(self.letter(text) for text in (cell.reason, cell.note) if text)
        if cell.value is None:
            return Box(DASH, span, "", notes, key, form)
        text = form(cell.value)
        if cell.spread is not None:
            text += f" ± {format_spread(text, cell.spread, form)}"
        return Box(text, span, self.marks.get(key, ""), notes, key, form)

    def letter(self, note: str) -> str:
        number = len(self.letters)
        new = chr(ord("a") + number % 26) * (1 + number // 26)
        return self.letters.setdefault(note, new)

    def grid(self, groups: Sequence[int], heads: Sequence[Row], rows: Sequence[Row]) -> Grid:
        """The table, with notes about protocols and seeds."""
        general = [protocol_note(p for cell in self.cells.values() for p in cell.protocols)]
        general.append(self.draws_note())
        notes = [("", text) for text in general if text]
        notes += [(letter, text) for text, letter in self.letters.items()]
        kind, caption = self.table.kind, self.table.caption
        return Grid(self.name, kind, caption, (*groups,), (*heads,), (*rows,), (*notes,))

    def draws_note(self) -> str:
        """On how many trainings, draws and recoveries the numbers rest."""
        if not isinstance(self.table, QualityTable):
            return ""
        measured = {key: cell for key, cell in self.cells.items() if cell.value is not None}
        recovered = {key: cell for key, cell in measured.items() if key.rft in RECOVERED}
        drawn = {
            cell.seeds
            for key, cell in measured.items()
            if key not in recovered and key.method != BASELINE
            if key.rft in REFITTED or self.config.methods[key.method].drawn
        }
        trainings = {cell.trainings for cell in measured.values()}
        sources = [self.config.models[model].source.kind for model in self.table.models]
        draws = [
            *_counted(drawn, "draw of channels or text", "draws of channels or text"),
            *_counted({cell.seeds for cell in recovered.values()}, "recovery", "recoveries"),
        ]
        parts = [*_counted(trainings if "pretrain" in sources else (), "training", "trainings")]
        several = max(trainings, default=1) > 1
        parts += ["of each " * several + ", ".join(draws)] if draws else []
        spread = f"± one standard deviation over {'trainings' if several else 'seeds'}"
        spreads = any(cell.spread is not None for cell in measured.values())
        return "; ".join([", ".join(parts)] * bool(parts) + [spread] * spreads)

    def _marks(self) -> dict[Key, Mark]:
        """Of methods compared with each other, everything else being equal."""
        groups: dict[Key, dict[Key, float]] = {}
        for key, cell in self.cells.items():
            if key.method != BASELINE and cell.value is not None:
                groups.setdefault(key._replace(method="", target=""), {})[key] = cell.value
        found: dict[Key, Mark] = {}
        for group, values in groups.items():
            lower = lower_is_better(self.config, group.metric)
            is_mean = group.metric == self.config.suite_of(group.metric).mean
            if lower or is_mean or self.table.kind != "breakdown":
                found |= marks(values, lower=lower)
        return found

    # --- of evaluated variants ---

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self.table.columns)

    def columns(self, stage: Stage) -> tuple[str, ...]:
        return self.config.columns(self.name, stage)

    def model(self, name: str) -> str:
        return self.config.models[name].label

    def method(self, name: str) -> str:
        return self.config.methods[name].label

    @property
    def eps(self) -> tuple[Eps, ...]:
        return self.config.eps_of(self.name)

    def key(
        self,
        model: str,
        method: str,
        ratio: Cut,
        rft: Stage,
        metric: str,
        target: str = "",
        eps: Eps | None = None,
    ) -> Key:
        if method == BASELINE:
            return self.baseline(model, rft, metric)
        target = target or self.config.methods[method].target
        variant = Variant(model, method, target, ratio, 0, rft, eps or self.eps[0])
        return variant_key(self.config, variant, metric)

    def baseline(self, model: str, rft: Stage, metric: str) -> Key:
        return variant_key(self.config, Variant(model, BASELINE, "", 0.0, 0, rft), metric)

    def numbers(self, keys: Iterable[Key], form: Form = one_decimal) -> list[Box]:
        return [self.number(key, form) for key in keys]

    def baselines(self) -> list[tuple[str, Stage]]:
        """The unpruned model, and the unpruned model after recovery if the run has that control."""
        recovery = self.config.recovery
        control = "post" in self.stages and recovery is not None and recovery.control
        recovered: list[tuple[str, Stage]] = [("Baseline, recovered", "post")] if control else []
        return [("Baseline", "none"), *recovered]

    def title(self, metric: str) -> str:
        """A column's heading in one line: its name, and whether more or less is better."""
        suite = self.config.suite_of(metric)
        name = suite.label if metric == suite.mean else suite.tasks[metric].label
        return f"{name} {self._arrow(metric)}"

    def two_line_heads(
        self, first: Sequence[str], second: Sequence[str], metrics: Iterable[str]
    ) -> list[Row]:
        """Headings after two lines of labels: the task, and what is measured."""
        names, measures = [*first], [*second]
        for metric in metrics:
            suite = self.config.suite_of(metric)
            if metric == suite.mean:
                names.append("Avg")
                measures.append(self._arrow(metric))
            else:
                task = suite.tasks[metric]
                names.append(task.label)
                measure = MEASURES.get(task.metric, task.metric)
                measures.append(f"{measure} {self._arrow(metric)}")
        return [row(names), row(measures)]

    def suite_sizes(self, metrics: Iterable[str]) -> list[int]:
        """How many neighbouring columns belong to one suite; a mean is a group of its own."""

        def group(metric: str) -> tuple[str, bool]:
            return self.config.suite_name(metric), metric == self.config.suite_of(metric).mean

        return [len(list(members)) for _, members in groupby(metrics, group)]

    def _arrow(self, metric: str) -> str:
        return "↓" if lower_is_better(self.config, metric) else "↑"

    # --- of a benchmark ---

    @property
    def benchmark(self) -> Any:
        return self.config.benchmarks[self.table.benchmark]

    def by_subject(self) -> dict[str, list[Measurement]]:
        """The measurements of each model or mixer."""
        timings = self.config.timings(self.name)
        return {name: list(group) for name, group in groupby(timings, lambda m: m.subject)}

    def timing(self, cell: Measurement, metric: str, form: Form) -> Box:
        return self.number(timing_key(self.config, cell, metric), form)
