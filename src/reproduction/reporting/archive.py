"""A run without its weights and text: all that tables, figures and the report are made of.

Unpacked in a checkout, a run with `partial` makes them again.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from safetensors.numpy import save

from reproduction.config import Config, QualityFigure
from reproduction.reporting.jobs import result_records
from reproduction.rules import Inputs, present
from reproduction.running.paths import OWNER
from reproduction.running.provenance import provenance_path
from statecut.files import atomic_write
from statecut.models.checkpoint import open_safetensors


def write_archive(config: Config, out: Path | str) -> None:
    """A .tar.xz, the same bytes for the same files."""
    with atomic_write(out, force=True) as aside, tarfile.open(aside, "w:xz") as archive:
        for path in sorted({*archived_files(config)}):
            member, content = tarfile.TarInfo(str(path)), archived_content(path)
            member.size = len(content)
            archive.addfile(member, BytesIO(content))


def archived_content(path: Path) -> bytes:
    """The file. Of a rotation, whose matrices are as large as weights, only what it says about
    itself, which is all that a report shows of it."""
    if path.suffix == ".safetensors":
        with open_safetensors(path) as file:
            if "rotation" in file.keys():  # noqa: SIM118 (not a dict)
                return save({}, metadata=file.metadata())
    return path.read_bytes()


def archived_files(config: Config) -> Iterator[Path]:
    """Paths of the checkout; some more than once."""
    inputs = Inputs(config)
    paths, root, variants = inputs.paths, Path(inputs.paths.root), inputs.shown().variants()
    sources = inputs.results()
    for name, figure in inputs.figures().items():
        if figure.kind == "filters":  # shows weights, so it is kept as it was drawn
            sources += [paths.figure(name, ending) for ending in ("pdf", "svg")]
        elif not isinstance(figure, QualityFigure):
            sources += present(inputs.figure_sources(name))
    sources += [paths.curve(variant) for variant in variants]
    # Of kernels and GPU, whatever models there are: another machine of this kind need not ask.
    sources += [paths.preflight(shape) for shape in config.trained_shapes()]
    sources += [step for variant in variants for step in paths.steps(variant)]
    for source in sources:
        yield from filter(Path.is_file, (Path(source), provenance_path(source)))
    yield from filter(Path.is_file, [root / OWNER])
    yield from result_records(root)  # what the results took
