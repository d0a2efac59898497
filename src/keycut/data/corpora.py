"""The corpora and tokenizers of a configuration, made into files."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterable
from pathlib import Path

from keycut.artefact import atomic_write
from keycut.config import Config, Corpus, HubCorpus, LocalCorpus
from keycut.data.documentation import documentation, documentation_source
from keycut.data.packing import Manifest, pack
from keycut.data.sources import Source, describe, matching, read, survey, tokenizer_files, write
from keycut.data.tokenizer import (
    Tokenizer,
    convert_sentencepiece,
    load_tokenizer,
    train_tokenizer,
)
from keycut.errors import InputError
from keycut.hub.downloads import DOWNLOADS, Downloads


def documents(
    corpus: Corpus, *, downloads: Downloads = DOWNLOADS, text: Path | None = None
) -> Iterable[str]:
    """The text of a corpus, in the order that `read` gives it.

    `text` is where `write_text` has put that of the documentation, which takes long to read.
    """
    if corpus.kind == "documentation":
        return documentation() if text is None else read(text)
    return read(*_files(corpus, downloads), field=corpus.text_field, seed=corpus.seed)


def write_text(out: Path | str) -> None:
    """The documentation's text in a file, read from the packages once for all who need it."""
    write(documentation(), out, force=True)


def source(corpus: Corpus, *, downloads: Downloads = DOWNLOADS) -> Source:
    """Where that text is from."""
    if corpus.kind == "documentation":
        return documentation_source()
    if corpus.kind == "hub":
        # The folder of a download is named after its commit.
        return Source(corpus.name, _root(corpus, downloads).name)
    return describe(*_files(corpus, downloads))


def survey_corpus(
    corpus: HubCorpus | LocalCorpus, *, downloads: Downloads = DOWNLOADS
) -> tuple[int, int | None]:
    """How many files and, where they say it themselves, rows a corpus has; each file is opened."""
    return survey(*_files(corpus, downloads), field=corpus.text_field)


def _files(corpus: HubCorpus | LocalCorpus, downloads: Downloads) -> list[Path]:
    if corpus.kind == "hub":
        # Two corpora may come from one data set, so its folder may hold more than is wanted.
        root = _root(corpus, downloads)
        there = sorted(path for path in root.rglob("*") if path.is_file())
        wanted = [p for p in there if _matches(p.relative_to(root).as_posix(), corpus.files)]
    else:
        matches = (path for pattern in corpus.files for path in matching(pattern))
        wanted = list(dict.fromkeys(matches))  # patterns may overlap
    if not wanted:
        raise InputError(f"corpus: no file matches {', '.join(corpus.files)}")
    return wanted


def _root(corpus: HubCorpus, downloads: Downloads) -> Path:
    return downloads.resolve(
        "dataset", corpus.name, revision=corpus.revision, patterns=corpus.files
    )


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def make_tokenizer(
    config: Config,
    name: str,
    out: Path,
    *,
    downloads: Downloads = DOWNLOADS,
    text: Path | None = None,
    force: bool = False,
) -> Tokenizer:
    """The folder of a tokenizer: trained, converted, or copied from where it is."""
    spec = config.tokenizers[name]
    if spec.kind == "train":
        corpus = config.corpora[spec.corpus]
        found = documents(corpus, downloads=downloads, text=text)
        return train_tokenizer(found, out, vocabulary_size=spec.vocab_size, force=force)
    if spec.kind == "hub":
        folder = downloads.resolve("model", spec.name, revision=spec.revision)
    else:
        folder = Path(spec.path)
        if folder.is_file():
            return convert_sentencepiece(folder, out, force=force)
    load_tokenizer(folder)  # an error now rather than in whoever reads the copy
    with atomic_write(out, force=force, folder=True) as aside:
        for path in tokenizer_files(folder):
            shutil.copyfile(path, aside / path.name)
    return load_tokenizer(out)


def pack_corpus(
    config: Config,
    name: str,
    tokenizer: Tokenizer,
    out: Path,
    *,
    downloads: Downloads = DOWNLOADS,
    text: Path | None = None,
    workers: int = 1,
    force: bool = False,
) -> Manifest:
    """All slices of a corpus in one packed folder."""
    corpus = config.corpora[name]
    return pack(
        documents(corpus, downloads=downloads, text=text),
        tokenizer,
        out,
        sequence_length=corpus.length,
        sequences=corpus.slices,
        boundary=corpus.boundary,
        source=source(corpus, downloads=downloads),
        seed=corpus.seed,
        workers=workers,
        force=force,
    )
