"""Whether what was downloaded is what the run needs, before a job finds out that it is not.

Hashes prove that files are those of the hub. Here they are opened: models must have the run's
sizes, the parameters of their class and the run's tokens, tasks their documents, corpora their
text. Of weights only the headers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reproduction.config import Config, Model, Task
from reproduction.config.evaluation import DATA_SETS
from reproduction.config.needs import (
    hub_sources,
    needed_corpora,
    needed_models,
    needed_tasks,
    needed_tokenizers,
    only_timed,
)
from reproduction.config.sources import HubCorpus, LocalCorpus
from reproduction.corpora import make_tokenizer, survey_corpus
from reproduction.running.import_model import check_sizes
from reproduction.suites.data import documents
from reproduction.suites.protocol import DOCUMENTS
from statecut.data.tokenizer import Tokenizer, check_vocabulary, load_backend
from statecut.download import describe
from statecut.errors import InputError
from statecut.hub.downloads import DOWNLOADS, Downloads, Key
from statecut.hub.fetch import fetch
from statecut.process import in_one_line

logger = logging.getLogger(__name__)

# What tokenizers of one vocabulary may still differ in: spaces, line ends, digits, other scripts.
PROBES = (
    "The state of a linear model keeps what it reads.",
    "two  spaces,\ttab\n\nand lines ",  # none before the first: versions of one tokenizer differ
    "def f(x): return x**2 + 3.14159 * 1024",
    "naïve façade – “quoted” … 東京 Москва 🙂",
    "</s><s><|endoftext|>",
)


@dataclass(frozen=True)
class Finding:
    """What one item that the run needs contains, or what is wrong with it."""

    item: str
    commit: str
    content: str
    problem: str = ""


@dataclass(frozen=True)
class DownloadReport:
    """The result of a download."""

    findings: tuple[Finding, ...]
    failures: Mapping[Key, str]  # why repositories could not be fetched

    def table(self) -> str:
        rows = [("item", "commit", "content")]
        rows += [(finding.item, finding.commit[:8], finding.content) for finding in self.findings]
        wide, short = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{a:<{wide}}  {b:<{short}}  {c}".rstrip() for a, b, c in rows)

    def raise_problems(self) -> None:
        """An error that names everything that is wrong, if anything is."""
        problems = [f"  {item.item}: {item.problem}" for item in self.findings if item.problem]
        failures = [f"  {reason}" for reason in self.failures.values()]
        if failures:
            failures.insert(0, "not downloaded (run the same command again to go on from here):")
        if problems:
            problems.insert(0, "downloaded, but not what is needed:")
        if lines := [*failures, *problems]:
            raise InputError("\n".join(lines))


def download_and_check(
    config: Config,
    *,
    update: Sequence[str] = (),
    downloads: Downloads = DOWNLOADS,
    endpoint: str | None = None,
) -> DownloadReport:
    """Fetch all that a configuration needs, and open all of it."""
    items = hub_sources(config)
    failures: Mapping[Key, str] = {}
    if items or update:
        failures = fetch(items, downloads, update=update, endpoint=endpoint)
    return DownloadReport(tuple(_Check(failures, downloads).run(config)), failures)


class _Check:
    def __init__(self, failures: Mapping[Key, str], downloads: Downloads) -> None:
        self.failures = failures
        self.downloads = downloads
        self.commits = downloads.commits()
        self.tokenizers: dict[str, Tokenizer] = {}

    def run(self, config: Config) -> Iterator[Finding]:
        """All that the run reads and does not make."""
        for name, spec in needed_tokenizers(config).items():
            if spec.kind != "train":
                key: Key | None = ("model", spec.name) if spec.kind == "hub" else None
                yield self._finding(f"tokenizer {name}", key, self._tokenizer, config, name)
        for name, model in needed_models(config).items():
            if (source := model.source).kind != "pretrain":
                key = ("model", source.name) if source.kind == "hub" else None
                yield self._finding(f"model {name}", key, self._model, model)
        for name, source in only_timed(config).items():
            key = ("model", source.name)
            yield self._finding(f"model {name}", key, self._shape, config.models[name])
        for name, corpus in needed_corpora(config).items():
            if corpus.kind != "documentation":
                key = ("dataset", corpus.name) if corpus.kind == "hub" else None
                yield self._finding(f"corpus {name}", key, self._corpus, corpus)
        # Columns of one task share its documents; the run itself makes the demo's.
        tasks = {(task.task, task.file): task for _, task in needed_tasks(config)}
        for task in tasks.values():
            if task.task in DATA_SETS or config.evaluation.made_from is None:
                key = None if task.file else ("dataset", DATA_SETS[task.task][0])
                paper = config.evaluation.protocol == "paper"
                yield self._finding(f"task {task.task}", key, self._task, task, paper)

    def _finding(
        self, item: str, key: Key | None, look: Callable[..., str], *arguments: Any
    ) -> Finding:
        if key in self.failures:
            return Finding(item, "", "not downloaded")
        commit = self.commits.get(key, "") if key else "local"
        logger.info("looking into %s", item)
        try:
            return Finding(item, commit, look(*arguments))
        except Exception as error:  # of a library, too; the other items are still to be reported
            problem = str(error) if isinstance(error, InputError) else in_one_line(error)
            return Finding(item, commit, "WRONG, see below", problem)

    def _tokenizer(self, config: Config, name: str) -> str:
        with TemporaryDirectory() as out:
            tokenizer = make_tokenizer(config, name, Path(out) / name, downloads=self.downloads)
        for model in needed_models(config).values():
            if model.tokenizer == name:
                check_vocabulary(tokenizer, model.vocab_size)
        self.tokenizers[name] = tokenizer
        return f"{tokenizer.vocabulary_size:,} tokens"

    def _model(self, model: Model) -> str:
        source: Any = model.source
        if source.kind == "hub":
            folder = self.downloads.resolve("model", source.name, revision=source.revision)
        else:
            folder = Path(source.path)
        check_sizes(model, folder)
        return f"{describe(folder)}; {self._own_tokenizer(folder, model.tokenizer)}"

    def _shape(self, model: Model) -> str:
        """Of a model that is only timed nothing but its config was fetched."""
        assert model.source.kind == "hub"
        check_sizes(model, self.downloads.resolve("model", model.source.name))
        sizes = f"{model.num_hidden_layers} layers, {model.num_heads} heads of {model.head_k_dim}"
        return f"{sizes}; only timed, without its weights"

    def _own_tokenizer(self, folder: Path, name: str) -> str:
        """Whether the tokenizer in a model's folder gives the ids of the one the run gives it."""
        own = _tokens_and_encoder(folder)
        if own is None:
            return "no tokenizer of its own"
        if name not in self.tokenizers:
            return f"its own tokenizer was not compared: {name} is not there"
        (ids, encode), tokenizer = own, self.tokenizers[name]
        new = tokenizer.backend.get_vocab(with_added_tokens=False)
        other = sorted(token for token in ids | new if ids.get(token) != new.get(token))
        other += [text for text in PROBES if encode(text) != tokenizer.encode(text).tolist()]
        if other:
            raise InputError(
                f"{folder}: its own tokenizer is not {name}, which the run gives it: "
                f"{len(other):,} tokens and texts have other ids, {other[0]!r} first: give it its "
                "own in `tokenizers`"
            )
        return f"its own tokenizer is {name}"

    def _corpus(self, corpus: HubCorpus | LocalCorpus) -> str:
        files, rows = survey_corpus(corpus, downloads=self.downloads)
        return f"{files:,} files, " + (f"{rows:,} rows" if rows is not None else "each opened")

    def _task(self, task: Task, paper: bool) -> str:
        count = len(documents(task, downloads=self.downloads))
        if paper and (expected := DOCUMENTS.get(task.task, count)) != count:
            raise InputError(f"{count:,} documents, and the paper's protocol has {expected:,}")
        return f"{count:,} documents" + (f" ({task.note})" if task.note else "")


def _tokens_and_encoder(folder: Path) -> tuple[dict[str, int], Callable[[str], list[int]]] | None:
    """The vocabulary of a folder's tokenizer, and the ids that it gives a text, if it has one."""
    if (file := folder / "tokenizer.json").is_file():
        backend = load_backend(file)
        vocabulary = backend.get_vocab(with_added_tokens=False)
        return vocabulary, lambda text: backend.encode(text, add_special_tokens=False).ids
    if (file := folder / "tokenizer.model").is_file():
        from sentencepiece import SentencePieceProcessor

        pieces = SentencePieceProcessor(model_file=str(file))
        return {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}, pieces.encode
    return None
