"""The report: one page that works from disk, with all results of a run and their provenance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from markupsafe import Markup

from reproduction.config import Config, Figure, Variant
from reproduction.reporting.claims import MARKS
from reproduction.reporting.curves import draw_curves
from reproduction.reporting.frame import (
    Key,
    Result,
    cells,
    draw_name,
    read_results,
    variant_key,
)
from reproduction.reporting.grid import protocol_note
from reproduction.reporting.headline import Headline
from reproduction.reporting.heat import STEPS, Look, against_baseline, against_paper
from reproduction.reporting.jobs import Record, summarize_jobs
from reproduction.reporting.origins import Origins
from reproduction.reporting.style import COLUMN, bars
from reproduction.reporting.tables import lay_out
from reproduction.reporting.verdict import Judgement, Word, claims_only, read_judgements
from reproduction.reporting.writing import HTML, to_html
from reproduction.running.provenance import provenance_path
from statecut.files import atomic_write, canonical_json
from statecut.version import __version__

CURVES = {
    "pretraining": "Cross-entropy while the models were pretrained, each for the first time.",
    "recovery": "Cross-entropy during recovery, by model and ratio; mean over seeds.",
}


def write_report(
    config: Config,
    *,
    frames: Sequence[Path | str],
    verdict: Path | str,
    figures: Sequence[Path | str],
    curves: Mapping[Variant, Path | str],
    steps: Mapping[Variant, Sequence[Path | str]],
    records: Iterable[Record],
    out: Path | str,
) -> None:
    """One HTML page of a run.

    frames:   of every table of the configuration, in its order
    verdict:  the folder that `make_verdict` wrote
    figures:  the SVG of every figure, in the configuration's order
    curves:   the loss curve (.csv) of what was trained (rft none) or recovered
    steps:    files that say how a variant was made, in order (.json, .safetensors)
    records:  what jobs wrote about themselves (`jobs.result_records`)

    Curves and steps that do not exist are left out. Also read are the files that frames name as
    sources, and their provenance.
    """
    tables = dict(zip(config.tables, map(read_results, frames), strict=True))
    judgements = read_judgements(Path(verdict) / "cells.csv")
    answers = pd.read_csv(Path(verdict) / "claims.csv", keep_default_na=False).to_dict("records")
    claims = [claim for claim in answers if not claim["model"]]
    headline = Headline.of(config, cells(dict.fromkeys(chain(*tables.values()))))
    pictures, caption = (headline.pictures(), headline.caption) if headline else ({}, "")
    numbers = Numbers(config, chain(*tables.values()), steps)
    text = HTML.get_template("report.html.j2").render(
        config=config,
        scope=claims_only(config),
        headline=headline,
        panels=[inline(svg, f"__headline-{name}", caption) for name, svg in pictures.items()],
        claims=claims,
        claim_groups=group_claims(claims),
        answers=_count((claim["answer"] for claim in claims), MARKS),
        few_draws=sum(bool(claim["few_draws"]) for claim in claims),
        other_claims=[claim for claim in answers if claim["model"]],
        marks=MARKS,
        words=_count((judgement.word for judgement in judgements), get_args(Word)),
        steps=STEPS,
        tables=[
            _heat_map(config, name, results, judgements, numbers)
            for name, results in tables.items()
        ],
        figures=[
            _picture("figure", name, _with_bars(config, figure), Path(file).read_text())
            for (name, figure), file in zip(config.figures.items(), figures, strict=True)
        ],
        training=[
            _picture("training", name, CURVES[name], svg)
            for name, svg in draw_curves(config, curves).items()
        ],
        work=summarize_jobs(records),
        # Whatever texts are in it, this JSON does not end the <script> around it.
        data=Markup(canonical_json(numbers.to_json(judgements)).replace("<", "\\u003c")),
        version=__version__,
    )
    with atomic_write(out, force=True) as aside:
        aside.write_text(text)


class Numbers:
    """Every number of a run, once, with the files that it came from."""

    def __init__(
        self,
        config: Config,
        results: Iterable[Result],
        steps: Mapping[Variant, Sequence[Path | str]],
    ) -> None:
        self.config, self.origins = config, Origins()
        self.steps = [
            [self.origins.add(path) for path in paths if Path(path).is_file()]
            for paths in steps.values()
        ]
        self.variants = {self._place(variant): i for i, variant in enumerate(steps)}
        self.results: dict[Key, dict[Result, None]] = {}
        for result in results:
            self.results.setdefault(result.key, {})[result] = None
        self.places = {key: i for i, key in enumerate(self.results)}

    def _place(self, variant: Variant) -> tuple[Key, int, int]:
        key = variant_key(self.config, variant, "")
        return key, self.config.models[variant.model].training, variant.seed

    def to_json(self, judgements: Iterable[Judgement]) -> dict[str, Any]:
        """What the page's script shows when a number is clicked."""
        judged: dict[str, dict[int, Any]] = {}
        for j in judgements:
            if j.key in self.places:
                shown = [j.paper, j.difference, j.tolerance, j.word, j.why, j.errata]
                judged.setdefault(j.table, {})[self.places[j.key]] = shown
        labelled: dict[str, Any] = {**self.config.models, **self.config.methods}
        return {
            "labels": {name: part.label for name, part in labelled.items()},
            "keys": [list(key) for key in self.places],
            "numbers": [[self._origin(result) for result in r] for r in self.results.values()],
            "judged": judged,
            "made": self.steps,
            "origins": self.origins.to_json(),
        }

    def _origin(self, result: Result) -> list[Any]:
        source = result.source
        paths = (Path(source), provenance_path(source)) if source else ()
        files = [self.origins.add(path) for path in paths if path.is_file()]
        place = result._replace(key=result.key._replace(metric="")).place
        variant, name = self.variants.get(place), draw_name(result).capitalize()
        return [name, result.value, result.stderr, result.reason, files, variant]


def group_claims(claims: Iterable[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """By what they are about; groups and claims that were measured stand first."""
    groups: dict[str, list[dict[str, str]]] = {}
    for claim in sorted(claims, key=lambda claim: claim["answer"] == "not measured"):
        groups.setdefault(claim["about"], []).append(claim)
    return groups


def _heat_map(
    config: Config,
    name: str,
    results: Sequence[Result],
    judgements: Iterable[Judgement],
    numbers: Numbers,
) -> dict[str, Any]:
    """Compared with the paper's numbers where it has them, elsewhere with the unpruned model."""
    grid, ours = lay_out(config, name, results), cells(results)
    # The page says once that a run's settings are its own.
    own = protocol_note([config.evaluation.protocol])
    grid = replace(grid, notes=tuple(note for note in grid.notes if note != ("", own)))
    boxes = {box.key: box for row in grid.rows for box in row.boxes if box.key}
    judged = {judgement.key: judgement for judgement in judgements if judgement.table == name}
    looks = {key: Look() for key in ours}  # of a row that the paper does not have
    for key in ours:
        if not judged:
            looks[key] = against_baseline(config, key, ours, boxes)
        elif key in judged:
            looks[key] = against_paper(config, judged[key], boxes[key].form(judged[key].paper))
    html = Markup(to_html(grid, looks=looks, places=numbers.places))
    return {"name": name, "paper": bool(judged), "html": html}


def _count(values: Iterable[str], names: Iterable[str]) -> dict[str, int]:
    counts = Counter(values)
    return {name: counts[name] for name in names}


def _with_bars(config: Config, figure: Figure) -> str:
    if figure.kind == "sweep":
        return f"{figure.caption} Bars are two standard errors over repeats."
    of_draws = bars(config) if figure.kind in ("quality", "state") else ""
    return f"{figure.caption} {of_draws}".strip()


def _picture(section: str, name: str, caption: str, svg: str) -> dict[str, Any]:
    """`broad`: whether it has several panels side by side, too small for a phone."""
    width = re.search(r'width="([\d.]+)pt"', svg)
    broad = width is not None and float(width[1]) > 72 * COLUMN * 1.5
    id_ = f"__{section}-{name}"
    drawn = inline(svg, id_, caption)
    return {"id": id_, "name": name, "caption": caption, "svg": drawn, "broad": broad}


def inline(svg: str, prefix: str, caption: str) -> Markup:
    """An SVG as a part of a page: with a label for screen readers, and a prefix to its ids."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    # Its style for all elements would apply to the whole page.
    body = re.sub(r"<style[^>]*>\*\{(.*?)\}</style>", "", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', f"{prefix}-", body)
    label = Markup('<svg role="img" aria-label="{}"').format(caption)
    return Markup(body.replace("<svg", label, 1))
