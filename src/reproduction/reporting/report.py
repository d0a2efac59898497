"""The report: one page that works from disk, with all results of a run and their provenance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from markupsafe import Markup

from reproduction.config import Config, Figure, Variant
from reproduction.reporting.claims import MARKS, Answered
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
from reproduction.reporting.heat import STEPS, Look, against_baseline, against_paper
from reproduction.reporting.jobs import Record, summarize_jobs
from reproduction.reporting.style import COLUMN, bars
from reproduction.reporting.tables import lay_out
from reproduction.reporting.verdict import Judgement, Word, reach_verdict
from reproduction.reporting.writing import HTML, to_html
from reproduction.running.provenance import provenance_path
from statecut.files import atomic_write, canonical_json, read_json
from statecut.version import __version__

CURVES = {
    "pretraining": "Cross-entropy while the models were pretrained, each for the first time.",
    "recovery": "Cross-entropy during recovery, by model and ratio; mean over seeds.",
}


def write_report(
    config: Config,
    *,
    frames: Sequence[Path | str],
    figures: Sequence[Path | str],
    curves: Mapping[Variant, Path | str],
    steps: Mapping[Variant, Sequence[Path | str]],
    records: Iterable[Record],
    out: Path | str,
) -> None:
    """One HTML page of a run.

    frames:   of every table of the configuration, in its order
    figures:  the SVG of every figure, in the configuration's order
    curves:   the loss curve (.csv) of what was trained (rft none) or recovered
    steps:    files that say how a variant was made, in order
    records:  what jobs wrote about themselves (`jobs.result_records`)

    Curves and steps that do not exist are left out. Also read are the files that frames name as
    sources, and their provenance; config/claims.yaml and config/published.
    """
    tables = dict(zip(config.tables, map(read_results, frames), strict=True))
    verdict = reach_verdict(config, tables)
    claims = [answered for answered in verdict.claims if not answered.model]
    numbers = Numbers(config, steps)
    pictures = [
        _picture("figure", name, _with_bars(config, figure), Path(file).read_text())
        for (name, figure), file in zip(config.figures.items(), figures, strict=True)
    ]
    kinds = [figure.kind for figure in config.figures.values()]
    lead = next((kinds.index(kind) for kind in ("state", "quality") if kind in kinds), None)
    text = HTML.get_template("report.html.j2").render(
        config=config,
        scope=verdict.scope,
        lead=None if lead is None else pictures.pop(lead),
        claims=claims,
        claim_groups=group_claims(claims),
        answers=_count((answered.answer for answered in claims), MARKS),
        few_draws=sum(bool(answered.few_draws) for answered in claims),
        other_claims=[answered for answered in verdict.claims if answered.model],
        marks=MARKS,
        words=_count((judgement.word for judgement in verdict.cells), get_args(Word)),
        steps=STEPS,
        tables=[
            _heat_map(config, name, results, verdict.cells, numbers)
            for name, results in tables.items()
        ],
        figures=pictures,
        training=[
            _picture("training", name, CURVES[name], svg)
            for name, svg in draw_curves(config, curves).items()
        ],
        work=summarize_jobs(records),
        # Whatever texts are in it, this JSON does not end the <script> around it.
        data=Markup(canonical_json(numbers.to_json()).replace("<", "\\u003c")),
        version=__version__,
    )
    with atomic_write(out, force=True) as aside:
        aside.write_text(text)


class Numbers:
    """What the page's script shows when a number is clicked: every number of every table, each
    draw with the file that it was read from, and with the steps that made its model."""

    def __init__(self, config: Config, steps: Mapping[Variant, Sequence[Path | str]]) -> None:
        self.config, self.sources = config, dict[str, dict[str, Any]]()
        self.numbers: list[Any] = []
        self.steps = [[str(p) for p in paths if Path(p).is_file()] for paths in steps.values()]
        self.variants = {self._place(variant): i for i, variant in enumerate(steps)}

    def _place(self, variant: Variant) -> tuple[Key, int, int]:
        key = variant_key(self.config, variant, "")
        return key, self.config.models[variant.model].training, variant.seed

    def add(self, results: Iterable[Result], judged: Mapping[Key, Judgement]) -> dict[Key, int]:
        """The numbers of a table; their places in `numbers`."""
        draws: dict[Key, list[Any]] = {}
        for result in results:
            draws.setdefault(result.key, []).append(self._draw(result))
        places = {key: len(self.numbers) + i for i, key in enumerate(draws)}
        for key, own in draws.items():
            j = judged.get(key)
            said = j and [j.paper, j.difference, j.tolerance, j.word, j.why, j.errata]
            self.numbers.append([list(key), said, own])
        return places

    def _draw(self, result: Result) -> list[Any]:
        if result.source and result.source not in self.sources:
            self.sources[result.source] = _origin(result.source)
        place = result._replace(key=result.key._replace(metric="")).place
        name, variant = draw_name(result).capitalize(), self.variants.get(place)
        return [name, result.value, result.stderr, result.reason, result.source, variant]

    def to_json(self) -> dict[str, Any]:
        labelled: dict[str, Any] = {**self.config.models, **self.config.methods}
        return {
            "labels": {name: part.label for name, part in labelled.items()},
            "numbers": self.numbers,
            "sources": self.sources,
            "steps": self.steps,
        }


def _origin(source: str) -> dict[str, Any]:
    """Of which model a file of results is, and where its job ran with what."""
    record, provenance = read_json(source), provenance_path(source)
    job = read_json(provenance) if provenance.is_file() else {}
    machine = record.get("machine", record)
    return {
        "model": record.get("model"),
        "device": job.get("gpus") or machine.get("gpu") or machine["device"],
        "started": job.get("started"),
        "commit": job.get("commit"),
        "versions": [f"{name} {version}" for name, version in machine["versions"].items()],
    }


def group_claims(claims: Iterable[Answered]) -> dict[str, list[Answered]]:
    """By what they are about; groups and claims that were measured stand first."""
    groups: dict[str, list[Answered]] = {}
    for answered in sorted(claims, key=lambda answered: answered.answer == "not measured"):
        groups.setdefault(answered.claim.about, []).append(answered)
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
    html = Markup(to_html(grid, looks=looks, places=numbers.add(results, judged)))
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
