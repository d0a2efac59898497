"""From the corpora and tokenizers of a configuration to packed tokens and tokenizer folders."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterable
from pathlib import Path

from reproduction.config import Config, Corpus, HubCorpus, LocalCorpus
from reproduction.config.sources import matching, tokenizer_files
from reproduction.documentation import documentation_source
from reproduction.new_tokenizers import convert_sentencepiece, train_tokenizer
from statecut.data.packing import Manifest, pack
from statecut.data.sources import Source, describe, read
from statecut.data.tokenizer import Tokenizer, load_tokenizer
from statecut.errors import InputError
from statecut.files import atomic_write
from statecut.hub import resolve


def documents(corpus: Corpus, *, text: Path | None = None) -> Iterable[str]:
    """The text of a corpus, in the order that `read` gives it; `text` is the documentation's."""
    if corpus.kind == "documentation":
        assert text is not None
        return read(text)
    return read(*_files(corpus), field=corpus.text_field, seed=corpus.seed)


def source(corpus: Corpus) -> Source:
    """Where the text of a corpus comes from."""
    if corpus.kind == "documentation":
        return documentation_source()
    if corpus.kind == "hub":
        # The folder of a download is named after its commit.
        return Source(corpus.name, _root(corpus).name)
    return describe(*_files(corpus))


def survey_corpus(corpus: HubCorpus | LocalCorpus) -> tuple[int, int | None]:
    """The number of files and, if all are parquet files, of rows. Each is opened, and read up to
    its first document."""
    files = _files(corpus)
    for file in files:
        if next(iter(read(file, field=corpus.text_field)), None) is None:
            raise InputError(f"{file}: holds no text")
    if {file.suffix for file in files} != {".parquet"}:
        return len(files), None
    from pyarrow import parquet

    return len(files), sum(parquet.read_metadata(file).num_rows for file in files)


def _files(corpus: HubCorpus | LocalCorpus) -> list[Path]:
    if corpus.kind == "hub":
        # Two corpora may come from one data set, whose folder then has files of both.
        root = _root(corpus)
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        chosen = {name for pattern in corpus.files for name in fnmatch.filter(names, pattern)}
        files = sorted(root / name for name in chosen)
    else:
        matches = (path for pattern in corpus.files for path in matching(pattern))
        files = list(dict.fromkeys(matches))  # patterns may overlap
    if not files:
        raise InputError(f"corpus: no file matches {', '.join(corpus.files)}")
    return files


def _root(corpus: HubCorpus) -> Path:
    return resolve("dataset", corpus.name, revision=corpus.revision, patterns=corpus.files)


def make_tokenizer(config: Config, name: str, out: Path, *, text: Path | None = None) -> Tokenizer:
    """Write a tokenizer folder: trained, converted or copied."""
    spec = config.tokenizers[name]
    if spec.kind == "train":
        texts = documents(config.corpora[spec.corpus], text=text)
        return train_tokenizer(texts, out, vocabulary_size=spec.vocab_size)
    if spec.kind == "hub":
        folder = resolve("model", spec.name, revision=spec.revision)
    else:
        folder = Path(spec.path)
        if folder.is_file():
            return convert_sentencepiece(folder, out)
    load_tokenizer(folder)  # an error before the copy is made
    with atomic_write(out, force=True, folder=True) as aside:
        for path in tokenizer_files(folder):
            shutil.copyfile(path, aside / path.name)
    return load_tokenizer(out)


def pack_corpus(
    config: Config,
    name: str,
    tokenizer: Tokenizer,
    out: Path,
    *,
    text: Path | None = None,
    workers: int = 1,
) -> Manifest:
    """Pack all slices of a corpus into one folder."""
    corpus = config.corpora[name]
    return pack(
        documents(corpus, text=text),
        tokenizer,
        out,
        sequence_length=corpus.length,
        sequences=corpus.slices,
        boundary=corpus.boundary,
        source=source(corpus),
        seed=corpus.seed,
        workers=workers,
        force=True,
    )
