"""The steps of reporting, from files to files: what the rules of the workflow call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keycut.config import Config
from keycut.reporting.claims import read_claims
from keycut.reporting.frame import (
    read_frame,
    read_published,
    read_sources,
    refuse_count,
    table_frame,
    union,
    write_frame,
)
from keycut.reporting.tables import lay_out
from keycut.reporting.verdict import reach_verdict, read_errata, read_lines, verify, write_verdict
from keycut.reporting.writing import Picture, write_document, write_table


def make_frame(
    config: Config, table: str, sources: Sequence[Path | str | None], out: Path | str
) -> None:
    """The numbers of one table, from what was measured for it (`frame.read_sources`)."""
    write_frame(out, table_frame(config, table, read_sources(config, table, sources)))


def make_union(frames: Sequence[Path | str], out: Path | str) -> None:
    """The numbers of all tables."""
    write_frame(out, union(map(read_frame, frames)))


def make_table(
    config: Config, table: str, frame: Path | str, folder: Path | str, templates: Path | str
) -> None:
    """TABLE.tex, TABLE.csv and TABLE.html in a folder."""
    write_table(lay_out(config, table, read_frame(frame)), folder, templates)


def make_document(
    config: Config,
    tables: Sequence[Path | str],
    figures: Sequence[Path | str],
    out: Path | str,
    templates: Path | str,
) -> None:
    """One LaTeX document of tables (.tex), and of the figures of the run (.pdf), in its order."""
    refuse_count(f"the document of {config.run}", "figures", len(config.figures), len(figures))
    shown = [
        Picture(name, Path(file), figure.caption)
        for (name, figure), file in zip(config.figures.items(), figures, strict=True)
    ]
    title = f"Keycut: results of the run {config.run}"
    write_document(out, map(Path, tables), templates, title=title, figures=shown)


def make_verdict(
    config: Config,
    frames: Sequence[Path | str],
    out: Path | str,
    published: Path | str,
    claims: Path | str,
) -> None:
    """cells.csv, claims.csv and verdict.txt in a folder, from the frames of all tables in order.

    `published` is the folder of the paper's numbers and errata.
    """
    published = Path(published)
    refuse_count(f"the verdict of {config.run}", "frames", len(config.tables), len(frames))
    verdict = reach_verdict(
        config,
        dict(zip(config.tables, map(read_frame, frames), strict=True)),
        read_published(published / "values.csv"),
        read_errata(published / "errata.csv"),
        read_claims(claims),
    )
    write_verdict(verdict, out)


def verify_files(cells: Path | str) -> None:
    """Fail if a decided number in the cells.csv of a verdict is outside its tolerance."""
    verify(read_lines(cells))
