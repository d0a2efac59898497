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
from reproduction.suites.data import documents
from reproduction.suites.protocol import DOCUMENTS
from statecut.data.tokenizer import Tokenizer, check_vocabulary, load_backend
from statecut.errors import InputError
from statecut.files import read_json
from statecut.hub.downloads import DOWNLOADS, Downloads, HubItem, Key
from statecut.hub.fetch import fetch

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
        problems = [f"{item.item}: {item.problem}" for item in self.findings if item.problem]
        lines = []
        if self.failures:
            lines += ["not downloaded (run the same command again to go on from here):"]
            lines += [f"  {reason}" for reason in self.failures.values()]
        if problems:
            lines += ["downloaded, but not what is needed:"]
            lines += [f"  {problem}" for problem in problems]
        if lines:
            raise InputError("\n".join(lines))


def download_and_check(
    config: Config | None,
    models: Sequence[str] = (),
    *,
    update: Sequence[str] = (),
    downloads: Downloads = DOWNLOADS,
    endpoint: str | None = None,
) -> DownloadReport:
    """Fetch all that a configuration needs, and models by their hub names, and open all of it."""
    items = [
        *(HubItem("model", name) for name in models),
        *(hub_sources(config) if config else ()),
    ]
    failures: Mapping[Key, str] = {}
    if items or update:
        failures = fetch(items, downloads, update=update, endpoint=endpoint)
    check = _Check(failures, downloads)
    findings = [*(check.run(config) if config else ()), *check.named(models)]
    return DownloadReport(tuple(findings), failures)


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

    def named(self, models: Sequence[str]) -> Iterator[Finding]:
        """Models by their hub names, as far as they can be checked without a configuration."""
        for name in models:
            yield self._finding(f"model {name}", ("model", name), self._named, name)

    def _finding(
        self, item: str, key: Key | None, look: Callable[..., str], *arguments: Any
    ) -> Finding:
        if key in self.failures:
            return Finding(item, "", "not downloaded")
        commit = self.commits.get(key, "") if key else "local"
        logger.info("looking into %s", item)
        try:
            return Finding(item, commit, look(*arguments))
        except InputError as error:
            return Finding(item, commit, "WRONG, see below", str(error))
        except Exception as error:  # of a library; the other items are still to be reported
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            return Finding(item, commit, "WRONG, see below", problem)

    def _tokenizer(self, config: Config, name: str) -> str:
        with TemporaryDirectory() as scratch:
            out = Path(scratch) / name
            tokenizer = make_tokenizer(config, name, out, downloads=self.downloads)
        for model in needed_models(config).values():
            if model.tokenizer == name:
                check_vocabulary(tokenizer, model.vocab_size)
        self.tokenizers[name] = tokenizer
        return f"{tokenizer.vocabulary_size:,} tokens"

    def _model(self, model: Model) -> str:
        from reproduction.running.import_model import check_sizes

        source = model.source
        if source.kind == "hub":
            folder = self.downloads.resolve("model", source.name, revision=source.revision)
        else:
            assert source.kind == "local"
            folder = Path(source.path)
        check_sizes(model, folder)
        return f"{_parameters(folder)}; {self._own_tokenizer(folder, model.tokenizer)}"

    def _shape(self, model: Model) -> str:
        """Of a model that is only timed nothing but its config was fetched."""
        from reproduction.running.import_model import check_sizes

        assert model.source.kind == "hub"
        check_sizes(model, self.downloads.resolve("model", model.source.name))
        return (
            f"{model.num_hidden_layers} layers, {model.num_heads} heads of {model.head_k_dim}; "
            "only timed, without its weights"
        )

    def _named(self, name: str) -> str:
        from statecut.models.architectures import ARCHITECTURES

        folder = self.downloads.resolve("model", name)
        model_type = read_json(folder / "config.json").get("model_type")
        if model_type not in ARCHITECTURES:
            return f"model_type {model_type!r} is none that Statecut knows: its hashes only"
        return _parameters(folder)

    def _own_tokenizer(self, folder: Path, name: str) -> str:
        """Whether the tokenizer in a model's folder gives the ids of the one the run gives it."""
        own = _tokens_and_encoder(folder)
        if own is None:
            return "no tokenizer of its own"
        if name not in self.tokenizers:
            return f"its own tokenizer was not compared: {name} is not there"
        (ids, encode), tokenizer = own, self.tokenizers[name]
        new = tokenizer.backend.get_vocab(with_added_tokens=False)
        differences = [
            f"{token!r} has id {ids.get(token, 'none')} in its own, {new.get(token, 'none')} in "
            f"{name}"
            for token in sorted(ids | new)
            if ids.get(token) != new.get(token)
        ]
        differences += [
            f"{text!r} is cut into other tokens"
            for text in PROBES
            if encode(text) != tokenizer.encode(text).tolist()
        ]
        if differences:
            more = f"; and {len(differences) - 3} more differences" if differences[3:] else ""
            raise InputError(
                f"{folder}: its own tokenizer is not {name}, which the run gives it: "
                f"{'; '.join(differences[:3])}{more}: give it its own in `tokenizers`"
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


def _parameters(folder: Path) -> str:
    from statecut.models.checkpoint import Checkpoint, check_parameters

    checkpoint = Checkpoint(folder)
    shape = checkpoint.shape
    widths = dict.fromkeys((shape.width, shape.value_width))
    layers = (
        f"{checkpoint.text_config['num_hidden_layers']} layers, {shape.heads} heads of "
        f"{' x '.join(map(str, widths))}"
    )
    try:
        count, ignored = check_parameters(checkpoint)
    except ImportError as error:  # a hybrid's class needs flash-attn
        return (
            f"{layers}; its class cannot be made here, so its parameters are not compared: {error}"
        )
    unused = f"; {len(ignored)} tensors are not used ({ignored[0]}, ...)" if ignored else ""
    return f"{layers}, {count:,} parameters{unused}"


def _tokens_and_encoder(
    folder: Path,
) -> tuple[dict[str, int], Callable[[str], list[int]]] | None:
    """The vocabulary of a folder's tokenizer, and the ids that it gives a text, if it has one."""
    if (file := folder / "tokenizer.json").is_file():
        backend = load_backend(file)
        vocabulary = backend.get_vocab(with_added_tokens=False)
        return vocabulary, lambda text: backend.encode(text, add_special_tokens=False).ids
    if (file := folder / "tokenizer.model").is_file():
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(file))
        ids = range(processor.vocab_size())
        return {processor.id_to_piece(i): i for i in ids}, processor.encode
    return None
