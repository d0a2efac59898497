"""The report: one page that works from disk, with all that a run found and where it came from."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from markupsafe import Markup

from keycut import __version__
from keycut.artefact import atomic_write, canonical_json
from keycut.config import Config, Variant
from keycut.reporting.claims import NO_CELL, Answer
from keycut.reporting.curves import draw_curves
from keycut.reporting.frame import (
    PAPER,
    Key,
    Result,
    cells,
    from_frame,
    read_frame,
    refuse_count,
    table_frame,
    variant_key,
)
from keycut.reporting.grid import Grid
from keycut.reporting.heat import STEPS, Look, against_baseline, against_paper
from keycut.reporting.jobs import read_work
from keycut.reporting.origins import Origins
from keycut.reporting.style import COLUMN
from keycut.reporting.tables import lay_out
from keycut.reporting.verdict import Line, Word, comparable, read_lines
from keycut.reporting.writing import html_environment, to_html
from keycut.running.paths import PROVENANCE

Files = Mapping[Variant, Sequence[Path | str]]

SYMBOLS = {"holds": "✓", "fails": "✗", "not decided": "?"}


@dataclass(frozen=True)
class HeatMap:
    """A table of the page, and whether it is held to the paper's."""

    name: str
    paper: bool
    html: Markup


@dataclass(frozen=True)
class Shown:
    """A picture of the page."""

    name: str
    caption: str
    svg: Markup

    @property
    def broad(self) -> bool:
        """Whether it has several panels beside each other, too small on a phone."""
        found = re.search(r'width="([\d.]+)pt"', self.svg)
        return found is not None and float(found[1]) > 72 * COLUMN * 1.5


def write_report(
    config: Config,
    *,
    frames: Sequence[Path | str],
    verdict: Path | str,
    figures: Sequence[Path | str],
    curves: Mapping[Variant, Path | str],
    jobs: Mapping[str, Sequence[Path | str]],
    made: Files,
    out: Path | str,
    templates: Path | str,
    records: Iterable[Path | str] = (),
    now: Mapping[str, str] = {},
    commit: str = "",
) -> None:
    """One HTML page of a run.

    frames:   of every table of the configuration, in its order
    verdict:  the folder that `make_verdict` wrote
    figures:  the SVG of every figure, in the configuration's order
    curves:   the loss curve (.csv) of what was trained (rft none) or recovered (rft post)
    jobs:     Snakemake's benchmark files (.tsv), by rule
    made:     files that say how a variant was made, in order (.json, .safetensors)
    records:  what jobs left beside their outputs (.provenance.json)
    now:      the code of rules that have a version: what other code made is marked
    commit:   of the checkout that writes the page

    The files that frames name as their sources are read too, and what stands beside them.
    """
    refuse_count(f"the report of {config.run}", "frames", len(config.tables), len(frames))
    refuse_count(f"the report of {config.run}", "figures", len(config.figures), len(figures))
    tables = dict(zip(config.tables, map(read_frame, frames), strict=True))
    judged = read_lines(Path(verdict) / "cells.csv")
    numbers = Numbers(config, tables.values(), made, now)
    maps = [_heat_map(config, name, tables[name], judged, numbers, templates) for name in tables]
    pictures = [
        Shown(
            name, figure.caption, inline(Path(file).read_text(), f"__figure-{name}", figure.caption)
        )
        for (name, figure), file in zip(config.figures.items(), figures, strict=True)
    ]
    training = [
        Shown(name, caption, inline(svg, f"__training-{name}", caption))
        for name, svg in draw_curves(config, curves).items()
        if (caption := CURVES[name])
    ]
    with open(Path(verdict) / "claims.csv", newline="") as file:
        claims = list(csv.DictReader(file))
    page = html_environment(Path(templates)).get_template("report.html.j2")
    with atomic_write(out, force=True) as aside:
        aside.write_text(
            page.render(
                config=config,
                scope=comparable(config),
                claims=claims,
                answers=_counted((claim["answer"] for claim in claims), get_args(Answer)),
                nothing=NO_CELL,
                symbols=SYMBOLS,
                words=_counted((line.word for line in judged), get_args(Word)),
                steps=STEPS,
                tables=maps,
                figures=pictures,
                training=training,
                work=read_work(jobs, records, now),
                data=Markup(_script(numbers.packed(judged))),
                commit=commit,
                version=__version__,
            )
        )


CURVES = {
    "pretraining": "Cross-entropy while the models were pretrained.",
    "recovery": "Cross-entropy during recovery, by model and ratio; mean over seeds.",
}


class Numbers:
    """Every number of a run, once, with the files that it came from."""

    def __init__(
        self,
        config: Config,
        tables: Iterable[pd.DataFrame],
        made: Files,
        now: Mapping[str, str],
    ) -> None:
        self.config, self.origins = config, Origins(now)
        self.made = [[self.origins.add(path) for path in paths] for paths in made.values()]
        self.makings = {
            (variant_key(config, variant, ""), variant.seed): i for i, variant in enumerate(made)
        }
        self.results: dict[Key, dict[Result, None]] = {}
        for result in (one for table in tables for one in from_frame(table)):
            self.results.setdefault(result.key, {})[result] = None
        self.places = {key: i for i, key in enumerate(self.results)}

    def packed(self, judged: Iterable[Line]) -> dict[str, Any]:
        """What the page's script shows when a number is clicked."""
        numbers = [[self._told(one) for one in results] for results in self.results.values()]
        words: dict[str, dict[int, Any]] = {}
        for line in judged:
            if line.key in self.places:
                words.setdefault(line.table, {})[self.places[line.key]] = [
                    line.paper, line.difference, line.tolerance, line.word, line.why, line.errata,
                ]  # fmt: skip
        return {
            "columns": list(Key._fields),
            "labels": {
                **{name: model.label for name, model in self.config.models.items()},
                **{name: method.label for name, method in self.config.methods.items()},
            },
            "keys": [list(key) for key in self.places],
            "numbers": numbers,
            "judged": words,
            "made": self.made,
            "origins": self.origins.packed(),
        }

    def _told(self, result: Result) -> list[Any]:
        files = []
        if result.source and not result.source.startswith(PAPER):
            files.append(self.origins.add(result.source))
            if Path(beside := f"{result.source}{PROVENANCE}").is_file():
                files.append(self.origins.add(beside))
        making = self.makings.get((result.key._replace(metric=""), result.seed))
        return [result.seed, result.value, result.stderr, result.reason, files, making]


def _heat_map(
    config: Config,
    name: str,
    frame: pd.DataFrame,
    judged: Iterable[Line],
    numbers: Numbers,
    templates: Path | str,
) -> HeatMap:
    """Held to the paper's numbers where they compare, and to the unpruned model elsewhere."""
    grid, ours = lay_out(config, name, frame), cells(frame)
    lines = {line.key: line for line in judged if line.table == name}
    texts = _texts(_printed(config, name, lines) if lines else grid)
    looks = {}
    for key in ours:
        place = numbers.places[key]
        if not lines:
            looks[key] = against_baseline(config, place, key, ours, texts)
        elif key in lines:
            looks[key] = against_paper(config, place, lines[key], texts[key])
        else:
            looks[key] = Look(place, "", "", "")  # a row of ours that the paper has not
    return HeatMap(name, bool(lines), Markup(to_html(grid, Path(templates), looks)))


def _printed(config: Config, name: str, lines: Mapping[Key, Line]) -> Grid:
    """The table with the paper's numbers, for their form."""
    empty = from_frame(table_frame(config, name, []))
    theirs = [
        one._replace(value=lines[one.key].paper, source=PAPER, protocol="paper", reason="")
        for one in empty
        if one.key in lines
    ]
    return lay_out(config, name, table_frame(config, name, theirs))


def _texts(grid: Grid) -> dict[Key, str]:
    return {box.key: box.text for line in grid.lines for box in line.boxes if box.key}


def _counted(found: Iterable[str], names: Sequence[str]) -> dict[str, int]:
    counts = Counter(found)
    return {name: counts[name] for name in names}


_ID = re.compile(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)')


def inline(svg: str, prefix: str, caption: str) -> Markup:
    """An SVG as a part of a page: named for those who do not see it, its ids its own."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    # Its rule for all elements would be one for the whole page.
    body = re.sub(r"<style[^>]*>\*\{(.*?)\}</style>", "", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = _ID.sub(f"{prefix}-", body)
    named = Markup('<svg role="img" aria-label="{}"').format(caption)
    return Markup(body.replace("<svg", named, 1))


def _script(data: Any) -> str:
    """JSON that can stand inside a <script>, whatever texts are in it."""
    return canonical_json(data).replace("<", "\\u003c")
