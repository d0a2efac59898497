"""A table as LaTeX, CSV, HTML and Markdown, and all tables and figures as one document.

How tables look is in the templates: table.tex.j2, table.html.j2 and document.tex.j2.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from reproduction.config import Config
from reproduction.reporting.frame import Key, read_results
from reproduction.reporting.grid import Box, Grid
from reproduction.reporting.heat import Look
from reproduction.reporting.tables import lay_out
from reproduction.running.code import ROOT
from statecut.errors import InputError
from statecut.files import atomic_write

_TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        **{letter: f"\\{letter}" for letter in "{}&%#$_"},
        "–": "--",
        "×": r"$\times$",
        "±": r"$\pm$",
        "✓": r"$\checkmark$",
        "↓": r"$\downarrow$",
        "↑": r"$\uparrow$",
        "ₖ": r"$_k$",
    }
)


def escape_tex(text: str) -> str:
    return text.translate(_TEX)


def format_powers(text: str, before: str, after: str) -> str:
    """Numbers like 3.3e5 with `before` and `after` around the exponent instead of the e."""
    return re.sub(r"(?<=\d)e(\d+)", lambda match: f"{before}{match[1]}{after}", text)


def _environment(**options: Any) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "workflow/templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        **options,
    )
    environment.filters |= {"tex": escape_tex, "powers": format_powers}
    return environment


HTML = _environment(autoescape=True)
TEX = _environment(
    # Braces and percent signs belong to LaTeX.
    variable_start_string="<<",
    variable_end_string=">>",
    block_start_string="<%",
    block_end_string="%>",
    comment_start_string="<#",
    comment_end_string="#>",
)


def to_tex(grid: Grid) -> str:
    return TEX.get_template("table.tex.j2").render(table=grid)


def to_html(
    grid: Grid, looks: Mapping[Key, Look] | None = None, places: Mapping[Key, int] | None = None
) -> str:
    """A <table> without a page around it; with `looks`, a heat map whose numbers are buttons that
    have their key's place in the page's data."""
    template = HTML.get_template("table.html.j2")
    return template.render(table=grid, looks=looks or {}, places=places)


def to_rows(grid: Grid) -> list[list[str]]:
    """Rows of text: one of headings, then the numbers, with their notes in brackets, then the notes
    about all of them."""
    notes = {letter: note for letter, note in grid.notes if letter}
    general = [note for letter, note in grid.notes if not letter]

    def text(box: Box) -> str:
        return " ".join([box.text, *(f"({notes[letter]})" for letter in box.notes)]).strip()

    return [*_flat(grid, text), *([note, *[""] * (sum(grid.groups) - 1)] for note in general)]


def to_markdown(grid: Grid) -> str:
    """Caption, table and notes, the best numbers bold, as a page shows them."""

    def text(box: Box) -> str:
        shown = f"**{box.text}**" if box.mark == "best" else box.text
        return shown + "".join(f"<sup>{letter}</sup>" for letter in box.notes)

    head, *rows = _flat(grid, text)
    labels = grid.groups[0]
    sides = ["---"] * labels + ["---:"] * (len(head) - labels)
    lines = ([cell.replace("|", r"\|") for cell in cells] for cells in (head, sides, *rows))
    table = (f"| {' | '.join(cells)} |" for cells in lines)
    notes = (f"<sup>{letter}</sup> {note}" if letter else note for letter, note in grid.notes)
    parts = [grid.caption, "\n".join(table), "; ".join(notes)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _flat(grid: Grid, text: Callable[[Box], str]) -> Iterator[list[str]]:
    """One line of headings, then the rows, a cell per column."""
    heads = ([box.text for box in row.boxes for _ in range(box.span)] for row in grid.heads)
    yield [" ".join(filter(None, column)) for column in zip(*heads, strict=True)]
    for row in grid.rows:
        yield [cell for box in row.boxes for cell in (text(box), *[""] * (box.span - 1))]


def write_table(config: Config, name: str, frame: Path | str, folder: Path | str) -> None:
    """NAME.tex, .csv, .html and .md in a folder, from the frame of the table."""
    grid = lay_out(config, name, read_results(frame))
    texts = {"tex": to_tex(grid), "html": to_html(grid), "md": to_markdown(grid)}
    for ending, text in texts.items():
        with atomic_write(Path(folder) / f"{name}.{ending}", force=True) as aside:
            aside.write_text(text)
    with (
        atomic_write(Path(folder) / f"{name}.csv", force=True) as aside,
        open(aside, "w", newline="") as f,
    ):
        csv.writer(f, lineterminator="\n").writerows(to_rows(grid))


def write_document(
    config: Config, tables: Sequence[Path | str], figures: Sequence[Path | str], out: Path | str
) -> None:
    """A LaTeX document of tables (.tex) and of the figures (.pdf) of the configuration.

    It refers to them by paths relative to its own folder.
    """

    def relative(file: Path | str) -> str:
        return Path(os.path.relpath(file, Path(out).parent)).as_posix()

    text = TEX.get_template("document.tex.j2").render(
        title=f"Statecut: results of the run {config.run}",
        tables=map(relative, tables),
        figures=[
            (relative(file), figure.caption, name)
            for (name, figure), file in zip(config.figures.items(), figures, strict=True)
        ],
    )
    with atomic_write(out, force=True) as aside:
        aside.write_text(text)


def compile_document(document: Path | str, pdf: Path | str) -> None:
    """One PDF of a document, the same bytes every time."""
    document = Path(document)
    if not shutil.which("pdflatex"):  # in a container, say, of a machine that has it
        raise InputError(f"{pdf}: there is no pdflatex here; {document} needs none")
    with atomic_write(pdf, force=True) as aside:
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error"]
        command += [f"-output-directory={aside.parent.resolve()}", f"-jobname={aside.stem}"]
        # Without these, the PDF contains the time of compilation.
        clock = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"}
        for _ in range(2):  # the second run has the references that the first one wrote
            process = subprocess.run(
                [*command, document.name],
                cwd=document.parent,
                env=os.environ | clock,
                capture_output=True,
                text=True,
                errors="replace",
            )
            if process.returncode:
                raise InputError(f"{document}: LaTeX failed\n{process.stdout[-1500:]}")
