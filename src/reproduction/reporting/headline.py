"""What a reader of a report sees first: a picture, and two sentences from a run's numbers.

They are about the models and the perplexity of the run's first figure of kind `state`, or else
`quality`, and about the best method of the run's tables: the one whose perplexity, divided by the
unpruned model's, is lowest (geometric mean over these models). Methods are compared at the most
repaired stage that two of them, or else one, were measured at on all of these models. The numbers
are those of all tables, with the run's own eps. What was not measured is left out, and so is a
sentence that has no numbers; a difference within the noise says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from markupsafe import Markup

from reproduction.config import BASELINE, Config, Cut, QualityFigure, Stage, Variant, state_bytes
from reproduction.reporting import style
from reproduction.reporting.claims import differ
from reproduction.reporting.figures.quality import Panel, state_figure
from reproduction.reporting.frame import Cell, Key, published_name, variant_key
from reproduction.reporting.heat import format_change

MODELS = 4  # that fit in a first screen
IN_WORDS: dict[Stage, str] = {
    "pre": "as sliced",
    "refit": "refitted",
    "post": "recovered",
    "refit_post": "refitted and recovered",
}


@dataclass(frozen=True)
class Headline:
    """The parts of a run that its first picture and sentences are about."""

    config: Config
    cells: Mapping[Key, Cell]
    models: tuple[str, ...]
    column: str

    @classmethod
    def of(cls, config: Config, cells: Mapping[Key, Cell]) -> Headline | None:
        """None if no figure of the run shows a perplexity, or no cut model has one."""
        figures = [f for f in config.figures.values() if isinstance(f, QualityFigure)]
        for figure in sorted(figures, key=lambda figure: figure.kind != "state"):
            if config.suite_of(figure.column).tasks[figure.column].metric.endswith("perplexity"):
                tables = [config.tables[name] for name in figure.tables]
                models = dict.fromkeys(model for table in tables for model in table.models)  # type: ignore[union-attr]
                headline = cls(config, cells, tuple(models)[:MODELS], figure.column)
                return headline if headline.ratios and headline.compared else None
        return None

    @property
    def task(self) -> str:
        return self.config.suite_of(self.column).tasks[self.column].label

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
                for key, cell in self.cells.items()
                if key.compression and (key.model, key.conv_sharing) in names
                if (key.metric, key.eps) == (self.column, self.config.eps)
                if cell.value is not None
            }
        )

    @property
    def part(self) -> float:
        """That sentences are about: half of the state, or the largest part that was cut."""
        return 0.5 if 0.5 in self.ratios else self.ratios[-1]

    @cached_property
    def compared(self) -> tuple[Stage, dict[str, float]] | None:
        """The stage that methods are compared at, and the mean of log(perplexity / unpruned) of
        each that was measured on as many models as any."""
        rises = {s: {m: self._rises(m, s) for m in self.config.methods} for s in IN_WORDS}
        most = max((len(own) for stage in rises.values() for own in stage.values()), default=0)
        for least in (2, 1) if most else ():
            for stage in reversed(IN_WORDS):
                means = {m: fmean(own) for m, own in rises[stage].items() if len(own) == most}
                if len(means) >= least:
                    return stage, means
        return None

    def _rises(self, method: str, stage: Stage) -> list[float]:
        cells = [(self.cell(m, method, self.part, stage), self.whole(m)) for m in self.models]
        return [math.log(_ratio(cell, whole)) for cell, whole in cells if cell and whole]

    @property
    def method(self) -> str:
        assert self.compared
        return min(self.compared[1], key=self.compared[1].__getitem__)

    @property
    def chosen_by(self) -> str:
        """Why it is this method, and which others no model tells from it."""
        assert self.compared
        stage, methods = self.compared
        mean = ", mean over models" if len(self.models) > 1 else ""
        close = [
            self.config.methods[other].label
            for other in methods
            if other != self.method and not any(self._differ(m, other, stage) for m in self.models)
        ]
        remark = f"; too close to tell apart: {', '.join(close)}" if close else ""
        return f"of {len(methods)} methods the lowest perplexity {IN_WORDS[stage]}{mean}{remark}"

    def _differ(self, model: str, other: str, stage: Stage) -> bool:
        own, others = (self.cell(model, name, self.part, stage) for name in (self.method, other))
        return own is not None and others is not None and differ(own, others)

    # --- the picture ---

    def pictures(self) -> dict[str, str]:
        """An SVG for every model of which a cut was measured, small enough for a phone."""
        drawn = {}
        with style.drawing():
            for model in self.models:
                if panels := self._panels(model):
                    size = style.COLUMN, 2.2
                    figure = state_figure(self.config, self.column, panels, size, names=3)
                    drawn[model] = style.to_svg(figure)
        return drawn

    def _panels(self, model: str) -> list[Panel]:
        panels, whole = [], self.whole(model)
        baseline = whole.value if whole else None
        for stage in IN_WORDS:
            cuts = ((ratio, self.cell(model, self.method, ratio, stage)) for ratio in self.ratios)
            curve: dict[Cut, Cell] = {ratio: cell for ratio, cell in cuts if cell}
            if curve and whole:
                curve[0.0] = whole
            panels += [Panel(model, stage, baseline, {self.method: curve})] if curve else []
        return panels

    @property
    def caption(self) -> str:
        shown = {panel.stage for model in self.models for panel in self._panels(model)}
        refitted, recovered = shown & {"refit", "refit_post"}, shown & {"post", "refit_post"}
        sentences = [
            f"Perplexity on {self.task} against the state that a sequence needs, cut by "
            f"{self.config.methods[self.method].label}: {self.chosen_by}. Sliced: channels are "
            "removed, and nothing else.",
        ]
        if refitted:
            sentences.append(
                "Refitted, Statecut’s way: the matrices behind them are fitted to what is left, "
                "without training."
            )
        if recovered:
            sentences.append("Recovered, the paper’s way: trained again for a while.")
        return " ".join([*sentences, style.bars(self.config)]).strip()

    # --- sentences ---

    def sentences(self) -> list[Markup]:
        return [text for text in (self.cost(), self.gain()) if text]

    def cost(self) -> Markup | None:
        """What that part of the state costs."""
        clauses = []
        for model in self.models:
            whole = self.whole(model)
            changes = [
                Markup("<strong>{}</strong>{} {}").format(
                    format_change(_ratio(cell, whole)), _noise(cell, whole), name
                )
                for stage, name in IN_WORDS.items()
                if whole and (cell := self.cell(model, self.method, self.part, stage))
            ]
            if changes:
                label = self.config.models[model].label
                clauses.append(Markup("{} by {}").format(label, _listed(changes)))
        opening = Markup("Cutting {} of the state by {} ({}) changes perplexity on {} of {}.")
        method = self.config.methods[self.method].label
        names = _in_words(self.part), method, self.chosen_by, self.task
        return opening.format(*names, Markup("; of ").join(clauses)) if clauses else None

    def gain(self) -> Markup:
        """What the smaller state gives, of the first model with timings, or the first."""
        timed = {model: self._speeds(model) for model in self.models}
        model = next((model for model, speeds in timed.items() if speeds), self.models[0])
        spec = self.config.models[model]
        sizes = (format_bytes(state_bytes(spec, part)) for part in (self.part, 0.0))
        opening = "With {} cut, {}’s state is <strong>{}</strong> a sequence instead of {}{}."
        speeds = Markup("; the model {}").format(_listed(timed[model])) if timed[model] else ""
        return Markup(opening).format(_in_words(self.part), spec.label, *sizes, speeds)

    def _speeds(self, model: str) -> list[Markup]:
        """How many times as fast, with how many times as many sequences: as a CUDA graph where that
        was timed, and generation at the largest batch."""
        timed = self._timings(model)
        decoding = {
            (bool(match[1]), int(match[2])): match[0]
            for metric in timed
            if (match := re.fullmatch(r"decoding_(graph_)?tokens_per_s_(\d+)", metric))
        }
        passes = "graph_tokens_per_s" if "graph_tokens_per_s" in timed else "tokens_per_s"
        sentences = {passes: "runs {} times as fast"}
        if decoding:
            (_, batch), metric = max(decoding.items())
            sentences[metric] = f"generates text {{}} times as fast at a batch of {batch}"
        sentences["decoding_largest_batch"] = "fits {} times as many sequences on a GPU"
        return [
            Markup(sentence).format(Markup(f"<strong>{_ratio(*timed[metric]):.2f}</strong>"))
            + _noise(*timed[metric])
            for metric, sentence in sentences.items()
            if metric in timed
        ]

    def _timings(self, model: str) -> dict[str, tuple[Cell, Cell]]:
        """What was timed of the cut model and of the whole one."""
        name = published_name(self.config, model)
        cut, whole = (
            {
                key.metric: cell
                for key, cell in self.cells.items()
                if (key.model, key.conv_sharing, key.compression) == (*name, part)
                if key.head_k_dim and cell.value
            }
            for part in (self.part, 0.0)
        )
        return {metric: (cell, whole[metric]) for metric, cell in cut.items() if metric in whole}


def _ratio(cell: Cell, whole: Cell) -> float:
    assert cell.value is not None
    assert whole.value
    return cell.value / whole.value


def _noise(cell: Cell, whole: Cell) -> str:
    return "" if differ(cell, whole) else " (within the noise)"


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
