"""What a reader of a report sees first: up to three sentences from a run's numbers, and the points
of a picture (`reproduction.reporting.picture`).

They are about the models and the perplexity of the run's first figure of kind `state`, or else
`quality`, and about DRRQR, the paper's method, or else the first one of that figure. The numbers
are those of all tables, with the run's own eps. What was not measured is left out, and so is a
sentence that has no numbers; a difference within the noise says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from reproduction.config import (
    BASELINE,
    Config,
    QualityFigure,
    QualityTable,
    Stage,
    Variant,
    state_bytes,
)
from reproduction.reporting.claims import differ
from reproduction.reporting.frame import Cell, Key, published_name, variant_key
from reproduction.reporting.heat import format_change

MODELS = 4  # that fit in a first screen
IN_WORDS: dict[Stage, str] = {
    "pre": "as sliced",
    "refit": "refitted",
    "post": "recovered",
    "refit_post": "with both",
}


@dataclass(frozen=True)
class Headline:
    """The parts of a run that its first picture and sentences are about."""

    config: Config
    cells: Mapping[Key, Cell]
    models: tuple[str, ...]
    method: str
    column: str

    @classmethod
    def of(cls, config: Config, cells: Mapping[Key, Cell]) -> Headline | None:
        """None if no figure of the run shows a perplexity."""
        for kind in ("state", "quality"):
            for figure in config.figures.values():
                if isinstance(figure, QualityFigure) and figure.kind == kind:
                    task = config.suite_of(figure.column).tasks[figure.column]
                    if task.metric.endswith("perplexity"):
                        return cls._of_figure(config, cells, figure)
        return None

    @classmethod
    def _of_figure(
        cls, config: Config, cells: Mapping[Key, Cell], figure: QualityFigure
    ) -> Headline:
        tables = [config.tables[name] for name in figure.tables]
        shown = [table for table in tables if isinstance(table, QualityTable)]
        models = dict.fromkeys(model for table in shown for model in table.models)
        methods = [method for table in shown for method in table.methods]
        method = min(methods, key=lambda name: config.methods[name].algorithm != "drrqr")
        return cls(config, cells, tuple(models)[:MODELS], method, figure.column)

    @property
    def task(self) -> str:
        return self.config.suite_of(self.column).tasks[self.column].label

    def label(self, name: str) -> str:
        config = self.config
        return config.models[name].label if name in config.models else config.methods[name].label

    # --- numbers ---

    def cell(self, model: str, method: str, ratio: float, stage: Stage) -> Cell | None:
        """The perplexity of a variant, if it was measured."""
        target = "" if method == BASELINE else self.config.methods[method].target
        eps = self.config.eps if target else "kept"
        variant = Variant(model, method, target, ratio, 0, stage, eps)
        cell = self.cells.get(variant_key(self.config, variant, self.column))
        return cell if cell and cell.value is not None else None

    def whole(self, model: str) -> Cell | None:
        return self.cell(model, BASELINE, 0.0, "none")

    @cached_property
    def ratios(self) -> list[float]:
        """Those that any of the models was cut by."""
        names = {published_name(self.config, model) for model in self.models}
        return sorted(
            {
                key.compression
                for key in self.cells
                if key.compression and (key.model, key.conv_sharing) in names
                if (key.metric, key.eps) == (self.column, self.config.eps)
            }
        )

    @property
    def part(self) -> float:
        """That sentences are about: half of the state, or the largest part that was cut."""
        return 0.5 if 0.5 in self.ratios else self.ratios[-1]

    def points(self, model: str, stage: Stage) -> list[tuple[float, float, float]]:
        """Perplexities of the method by ratio, with their spread, from the whole model on; empty
        if no cut one was measured."""
        cut = [(ratio, self.cell(model, self.method, ratio, stage)) for ratio in self.ratios]
        if not any(cell for _, cell in cut):
            return []
        return [
            (ratio, cell.value, cell.spread or 0.0)
            for ratio, cell in [(0.0, self.whole(model)), *cut]
            if cell and cell.value is not None
        ]

    def timing(self, model: str, ratio: float, metric: str) -> Cell | None:
        """Of the whole model, or of the cut one."""
        for key, cell in self.cells.items():
            if (
                (key.model, key.conv_sharing) == published_name(self.config, model)
                and (key.compression, key.metric) == (ratio, metric)
                and key.head_k_dim is not None
                and cell.value is not None
            ):
                return cell
        return None

    # --- sentences ---

    def sentences(self) -> list[Markup]:
        if not self.ratios:
            return []
        return [text for text in (self.cost(), self.best_method(), self.gain()) if text]

    def cost(self) -> Markup | None:
        """What that part of the state costs."""
        clauses = []
        for model in self.models:
            whole, changes = self.whole(model), []
            for stage, name in IN_WORDS.items():
                cell = self.cell(model, self.method, self.part, stage)
                if whole and cell:
                    changes.append(Markup("{} {}").format(describe_change(cell, whole), name))
            if changes:
                clauses.append(Markup("{} by {}").format(self.label(model), _listed(changes)))
        if not clauses:
            return None
        opening = Markup("Cutting {} of the state by {} changes perplexity on {} of {}.")
        names = _in_words(self.part), self.label(self.method), self.task
        return opening.format(*names, Markup("; of ").join(clauses))

    def best_method(self) -> Markup | None:
        """Which method costs least, as sliced, at the largest ratio where three or more were."""
        for ratio in reversed(self.ratios):
            clauses = [self._best_for(model, ratio) for model in self.models]
            if known := [clause for clause in clauses if clause]:
                opening = Markup("With {} cut and nothing repaired, {}.")
                return opening.format(_in_words(ratio), Markup("; ").join(known))
        return None

    def _best_for(self, model: str, ratio: float) -> Markup | None:
        whole = self.whole(model)
        methods = self.config.methods
        target = methods[self.method].target  # others are compared in tables of their own
        firsts: dict[str, str] = {}  # so are further settings of an algorithm
        for name, method in methods.items():
            if method.target == target:
                firsts.setdefault(method.algorithm, name)
        sliced = {name: self.cell(model, name, ratio, "pre") for name in firsts.values()}
        ranked = sorted(
            ((name, cell) for name, cell in sliced.items() if cell),
            key=lambda pair: pair[1].value or 0.0,
        )
        if whole is None or len(ranked) < 3:
            return None
        (best, first), (worst, last) = ranked[0], ranked[-1]
        close = [self.label(name) for name, cell in ranked[1:] if not differ(first, cell)]
        remark = ""
        if close:
            verb = "is" if len(close) == 1 else "are"
            remark = Markup("; {} {} too close to tell apart").format(_listed(close), verb)
        text = Markup("<strong>{}</strong> is the best of {} methods for {} ({}{})").format(
            self.label(best), len(ranked), self.label(model), describe_change(first, whole), remark
        )
        if self.label(worst) not in close:
            text += Markup(" and {} the worst ({})").format(
                self.label(worst), describe_change(last, whole)
            )
        return text

    def gain(self) -> Markup:
        """What the smaller state gives, of the first model with timings, or the first."""
        timed = {model: self._speeds(model) for model in self.models}
        model = next((model for model, speeds in timed.items() if speeds), self.models[0])
        sizes = (state_bytes(self.config.models[model], part) for part in (self.part, 0.0))
        opening = "With {} cut, {}’s state is <strong>{}</strong> a sequence instead of {}{}."
        speeds = Markup("; the model {}").format(_listed(timed[model])) if timed[model] else ""
        texts = map(format_bytes, sizes)
        return Markup(opening).format(_in_words(self.part), self.label(model), *texts, speeds)

    def _speeds(self, model: str) -> list[Markup]:
        """How many times as fast, with how many times as many sequences: as a CUDA graph where that
        was timed, and generation at the largest batch."""

        def timed(metric: str) -> bool:
            return all(self.timing(model, part, metric) for part in (0.0, self.part))

        decoding = {
            (bool(match[1]), int(match[2])): match[0]
            for key in self.cells
            if (match := re.fullmatch(r"decoding_(graph_)?tokens_per_s_(\d+)", key.metric))
            if timed(match[0])
        }
        passes = "graph_tokens_per_s" if timed("graph_tokens_per_s") else "tokens_per_s"
        sentences = {passes: "runs {} times as fast"}
        if decoding:
            (_, batch), metric = max(decoding.items())
            sentences[metric] = f"generates text {{}} times as fast at a batch of {batch}"
        sentences["decoding_largest_batch"] = "fits {} times as many sequences on a GPU"
        texts = []
        for metric, sentence in sentences.items():
            own, whole = (self.timing(model, part, metric) for part in (self.part, 0.0))
            if own and whole and own.value and whole.value:
                times = Markup("<strong>{:.2f}</strong>").format(own.value / whole.value)
                texts.append(Markup(sentence).format(times) + _noise(own, whole))
        return texts


def describe_change(cell: Cell, whole: Cell) -> Markup:
    assert cell.value is not None
    assert whole.value
    change = format_change(cell.value / whole.value)
    return Markup("<strong>{}</strong>{}").format(change, _noise(cell, whole))


def _noise(cell: Cell, other: Cell) -> str:
    return "" if differ(cell, other) else " (within the noise)"


def format_bytes(size: float) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def _in_words(ratio: float) -> str:
    return {0.5: "half", 0.75: "three quarters"}.get(ratio, f"{100 * ratio:g} %")


def _listed(texts: Sequence[str]) -> Markup:
    """a, b and c."""
    *first, last = texts
    return Markup(" and ").join([Markup(", ").join(first), last] if first else [last])
