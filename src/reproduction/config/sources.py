"""Where tokenizers, models and text come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from reproduction.config.section import WHICH, HubName, Name, Section, Seed, Some, TextFile
from reproduction.documentation import Part


class FromHub(Section):
    """A model or tokenizer from the hub. A model's own config must agree with the sizes given."""

    kind: Literal["hub"] = WHICH
    name: HubName = Field(description="repository on the hub")
    revision: str = Field("main", description="branch or commit; `download` pins it once")


class FromDisk(Section):
    """A model or tokenizer from this machine."""

    kind: Literal["local"] = WHICH
    path: str = Field(description="a folder, or a sentencepiece .model, relative to the checkout")


class RandomWeights(Section):
    """A model that nobody trained, for rehearsals."""

    kind: Literal["random"] = WHICH


class TrainedTokenizer(Section):
    """A byte-pair tokenizer trained on the spot."""

    kind: Literal["train"] = WHICH
    corpus: Name = Field(description="corpus whose text it is trained on")
    vocab_size: PositiveInt = Field(description="number of tokens")


Tokenizer = Annotated[FromHub | FromDisk | TrainedTokenizer, Field(discriminator="kind")]


class CorpusBase(Section):
    length: PositiveInt = Field(description="tokens in one sequence")
    seed: Seed = Field(description="seed of the order of the documents")
    slices: dict[Name, PositiveInt] = Field(description="sequences per use, which share none")
    boundary: Literal["eos", "bos"] = Field("eos", description="after each document, or bos before")


class HubCorpus(CorpusBase):
    """Text from a data set on the hub.

    Of parquet files, 64 row groups at a time are read side by side, at even distances over all of
    them, so that small slices have text from everywhere. Other files are read as local ones are.
    """

    kind: Literal["hub"] = WHICH
    name: HubName = Field(description="data set on the hub")
    files: Some[str] = Field(("*",), description="patterns; * also crosses folders")
    text_field: str = Field("text", description="field of a record that holds the text")
    revision: str = Field("main", description="branch or commit; `download` pins it once")


class LocalCorpus(CorpusBase):
    """Text from files.

    Every slice takes from each file in proportion to its size. A file is read from its start and
    shuffled within a window (16 million characters for all files together): of a larger one, a
    small slice has only the beginning, unless it was mixed beforehand.
    """

    kind: Literal["local"] = WHICH
    files: Some[TextFile] = Field(
        description=".jsonl or .txt, plain, .xz, .gz or .zst; or patterns"
    )
    text_field: str = Field("text", description="field of a jsonl record that holds the text")


class DocumentationCorpus(CorpusBase):
    """Prose found in the installed Python packages: no download."""

    kind: Literal["documentation"] = WHICH
    part: Part = Field(description="one of its parts, which share no sentence")


Corpus = Annotated[HubCorpus | LocalCorpus | DocumentationCorpus, Field(discriminator="kind")]


def matching(pattern: str) -> list[Path]:
    """The files that match a pattern, relative to the working directory or absolute."""
    root = Path(Path(pattern).anchor)
    return sorted(root.glob(str(Path(pattern).relative_to(root))))


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer in a folder that may hold a model too."""
    return sorted(path for path in folder.glob("*token*") if path.is_file())
