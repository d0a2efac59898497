"""A table as LaTeX, CSV and HTML, and all of them as one document."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from keycut.artefact import atomic_write
from keycut.errors import InputError
from keycut.reporting.frame import Key
from keycut.reporting.grid import Box, Grid, Line
from keycut.reporting.heat import Look

GAP = r"@{\hskip 1.2em}"
"""Space between groups of columns."""

_TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "&": r"\&",
        "%": r"\%",
        "#": r"\#",
        "$": r"\$",
        "_": r"\_",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "–": "--",
        "×": r"$\times$",
        "±": r"$\pm$",
        "✓": r"$\checkmark$",
        "↓": r"$\downarrow$",
        "↑": r"$\uparrow$",
        "ₖ": r"$_k$",
    }
)
_POWER = re.compile(r"(?<=\d)e(\d+)")


def tex(text: str) -> str:
    return text.translate(_TEX)


def tex_line(line: Line, groups: tuple[int, ...]) -> str:
    """The boxes of a line, each in its columns."""
    boundaries = _boundaries(groups)
    parts = []
    for (_, last), box in _placed(line):
        body = _tex_box(box)
        if box.span > 1:
            # A \multicolumn drops the gap behind it, so it brings its own.
            gap = GAP if last in boundaries else ""
            body = rf"\multicolumn{{{box.span}}}{{c{gap}}}{{{body}}}"
        parts.append(body)
    return " & ".join(parts) + r" \\"


def tex_rules(line: Line) -> str:
    """A rule under every heading of several columns."""
    return " ".join(
        rf"\cmidrule(lr){{{first}-{last}}}"
        for (first, last), box in _placed(line)
        if box.span > 1 and box.text
    )


def tex_columns(groups: tuple[int, ...]) -> str:
    labels, *others = groups
    return GAP.join(["l" * labels, *("c" * group for group in others)])


def _tex_box(box: Box) -> str:
    text = tex(box.text)
    if box.key:
        text = _POWER.sub(r" $\\cdot$ 10\\textsuperscript{\1}", text)
    text = {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}"}.get(box.mark, text)
    return text + (rf"\textsuperscript{{{','.join(box.notes)}}}" if box.notes else "")


def _placed(line: Line) -> Iterator[tuple[tuple[int, int], Box]]:
    """Every box with its first and last column, counted from 1."""
    first = 1
    for box in line.boxes:
        yield (first, first + box.span - 1), box
        first += box.span


def _boundaries(groups: tuple[int, ...]) -> set[int]:
    """Columns with a gap behind them."""
    return {sum(groups[:i]) for i in range(1, len(groups))}


def _html_number(text: str) -> Markup:
    return Markup(_POWER.sub(r" · 10<sup>\1</sup>", str(escape(text))))


def _cell_id(box: Box) -> str:
    """The key of a number as one word, for whoever wants to link to it."""
    return "/".join("" if part is None else str(part) for part in box.key or ())


def to_tex(grid: Grid, templates: Path) -> str:
    return _tex_environment(templates).get_template(f"{grid.kind}.tex.j2").render(table=grid)


def to_html(grid: Grid, templates: Path, looks: Mapping[Key, Look] | None = None) -> str:
    """A <table> without a page around it; with `looks`, a heat map whose numbers are buttons."""
    template = html_environment(templates).get_template("table.html.j2")
    return template.render(table=grid, looks=looks or {})


def to_rows(grid: Grid) -> list[list[str]]:
    """Rows of text: one of headings, then the lines, their notes written out in brackets."""
    said = dict(grid.notes)
    names = [
        " ".join(filter(None, tiers)) for tiers in zip(*map(_spread_head, grid.heads), strict=True)
    ]
    lines = [
        [text for box in line.boxes for text in [_csv_box(box, said), *([""] * (box.span - 1))]]
        for line in grid.lines
    ]
    return [names, *lines]


def _spread_head(line: Line) -> list[str]:
    return [box.text for box in line.boxes for _ in range(box.span)]


def _csv_box(box: Box, said: dict[str, str]) -> str:
    return " ".join([box.text, *(f"({said[letter]})" for letter in box.notes)]).strip()


def write_table(grid: Grid, folder: Path | str, templates: Path | str) -> tuple[Path, Path, Path]:
    """NAME.tex, NAME.csv and NAME.html in a folder."""
    stem, templates = Path(folder) / grid.name, Path(templates)
    # Names may have dots, so the ending is added, never exchanged.
    paths = tuple(stem.with_name(f"{stem.name}.{ending}") for ending in ("tex", "csv", "html"))
    with atomic_write(paths[0], force=True) as aside:
        aside.write_text(to_tex(grid, templates))
    with atomic_write(paths[1], force=True) as aside, open(aside, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(to_rows(grid))
    with atomic_write(paths[2], force=True) as aside:
        aside.write_text(to_html(grid, templates))
    return paths[0], paths[1], paths[2]


# --- the document ---


@dataclass(frozen=True)
class Picture:
    """A figure of the document: a PDF or PNG file."""

    name: str
    file: Path
    caption: str


def write_document(
    path: Path | str,
    tables: Iterable[Path],
    templates: Path | str,
    *,
    title: str,
    figures: Iterable[Picture] = (),
) -> None:
    """A LaTeX document that inputs tables and shows figures, all named from where it stands."""
    path = Path(path)
    render = _tex_environment(Path(templates)).get_template("document.tex.j2").render
    with atomic_write(path, force=True) as aside:
        aside.write_text(
            render(
                title=title,
                tables=[_from(path.parent, table) for table in tables],
                figures=[(_from(path.parent, one.file), one.caption, one.name) for one in figures],
            )
        )


def compile_document(document: Path | str, pdf: Path | str) -> None:
    """One PDF of a document, the same bytes every time."""
    document, pdf = Path(document), Path(pdf)
    if not shutil.which("pdflatex"):
        raise InputError(
            f"{pdf}: pdflatex is not installed; on Debian it is in texlive-latex-base, and "
            "booktabs in texlive-latex-recommended"
        )
    with atomic_write(pdf, force=True) as aside:
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error"]
        command += [f"-output-directory={aside.parent.resolve()}", f"-jobname={aside.stem}"]
        # The time of compilation would otherwise be in it.
        clock = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"}
        for _ in range(2):  # the second time with the references that the first one found
            done = subprocess.run(
                [*command, document.name],
                cwd=document.parent,
                env=os.environ | clock,
                capture_output=True,
                text=True,
                errors="replace",
            )
            if done.returncode:
                raise InputError(f"{document}: LaTeX failed\n{done.stdout[-1500:]}")


def _from(folder: Path, file: Path) -> str:
    return Path(os.path.relpath(file, folder)).as_posix()


@cache
def html_environment(templates: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": _html_number, "cell_id": _cell_id}
    return environment


@cache
def _tex_environment(templates: Path) -> jinja2.Environment:
    # Braces and percent signs are LaTeX's own.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "tex": tex,
        "tex_line": tex_line,
        "tex_rules": tex_rules,
        "tex_columns": tex_columns,
    }
    return environment
