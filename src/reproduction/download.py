"""Whether what was downloaded is what the run needs, before a job finds out that it is not.

Hashes prove that files are those of the hub. Here they are opened: models must have the run's
sizes, the parameters of their class and the run's tokens, tasks their documents, corpora their
text. Of weights only the headers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from reproduction.config import Config, Model, Task, needs
from reproduction.config.evaluation import DATA_SETS
from reproduction.config.sources import HubCorpus, LocalCorpus
from reproduction.corpora import make_tokenizer, survey_corpus
from reproduction.import_model import check_sizes, folder_of
from reproduction.suites.data import documents
from reproduction.suites.protocol import DOCUMENTS
from statecut.data.tokenizer import Tokenizer, check_vocabulary, load_backend
from statecut.errors import InputError, nearest
from statecut.hub import Key, fetch, read_lock
from statecut.models.checkpoint import describe
from statecut.process import in_one_line

logger = logging.getLogger(__name__)

# What tokenizers of one vocabulary may still differ in: spaces, line ends, digits, other scripts.
PROBES = [
    "The state of a linear model keeps what it reads.",
    "two  spaces,\ttab\n\nand lines ",  # none before the first: versions of one tokenizer differ
    "def f(x): return x**2 + 3.14159 * 1024",
    "naïve façade – “quoted” … 東京 Москва 🙂",
    "</s><s><|endoftext|>",
]
Look = tuple[str, Key | None, Callable[[], str]]  # an item, where on the hub it is, what it holds


def download_and_check(config: Config, *, update: Collection[str] = ()) -> tuple[str, str]:
    """Fetch all that a configuration needs, and open all of it: a table of what is there, and
    everything that is wrong, if anything is."""
    items = needs.hub_sources(config)
    known = {item.name for item in items}
    if wrong := next((name for name in update if name not in known), None):
        raise InputError(f"cannot update {wrong}: not in the configuration{nearest(wrong, known)}")
    failures = fetch(items, update=update) if items else {}
    lock, rows, problems = read_lock(), [("item", "commit", "content")], []
    for item, key, look in _looks(config):
        if key in failures:
            rows.append((item, "", "not downloaded"))
            continue
        commit = lock[f"{key[0]}s"][key[1]]["commit"] if key else "local"
        logger.info("looking into %s", item)
        try:
            rows.append((item, commit[:8], look()))
        except Exception as error:  # of a library, too; the other items are still to be reported
            rows.append((item, commit[:8], "WRONG, see below"))
            problem = str(error) if isinstance(error, InputError) else in_one_line(error)
            problems.append(f"  {item}: {problem}")
    wide, short = (max(len(row[column]) for row in rows) for column in (0, 1))
    table = [f"{a:<{wide}}  {b:<{short}}  {c}".rstrip() for a, b, c in rows]
    if problems:
        problems.insert(0, "downloaded, but not what is needed:")
    if failures:
        again = "not downloaded (run the same command again to go on from here):"
        problems[:0] = [again, *(f"  {reason}" for reason in failures.values())]
    return "\n".join(table), "\n".join(problems)


def _looks(config: Config) -> Iterator[Look]:
    """All that the run reads and does not make."""
    loaded: dict[str, Tokenizer] = {}
    for name, spec in needs.needed_tokenizers(config).items():
        if spec.kind != "train":
            key: Key | None = ("model", spec.name) if spec.kind == "hub" else None
            yield f"tokenizer {name}", key, partial(_tokenizer, config, name, loaded)
    for name, model in needs.needed_models(config).items():
        if (source := model.source).kind != "pretrain":
            key = ("model", source.name) if source.kind == "hub" else None
            yield f"model {name}", key, partial(_model, model, loaded)
    for name, source in needs.only_timed(config).items():
        yield f"model {name}", ("model", source.name), partial(_timed, config.models[name])
    for name, corpus in needs.needed_corpora(config).items():
        if corpus.kind != "documentation":
            key = ("dataset", corpus.name) if corpus.kind == "hub" else None
            yield f"corpus {name}", key, partial(_corpus, corpus)
    # Columns of one task share its documents; the run itself makes the demo's.
    tasks = {(task.task, task.file): task for task in needs.needed_tasks(config)}
    for task in tasks.values():
        if task.task in DATA_SETS or config.evaluation.made_from is None:
            key = None if task.file else ("dataset", DATA_SETS[task.task][0])
            paper = config.evaluation.protocol == "paper"
            yield f"task {task.task}", key, partial(_task, task, paper)


def _tokenizer(config: Config, name: str, loaded: dict[str, Tokenizer]) -> str:
    with TemporaryDirectory() as out:
        tokenizer = make_tokenizer(config, name, Path(out) / name)
    for model in needs.needed_models(config).values():
        if model.tokenizer == name:
            check_vocabulary(tokenizer, model.vocab_size)
    loaded[name] = tokenizer
    return f"{tokenizer.vocabulary_size:,} tokens"


def _model(model: Model, loaded: dict[str, Tokenizer]) -> str:
    """Its sizes, its parameters, and whether its own tokenizer gives the ids of the run's."""
    folder = folder_of(model)
    check_sizes(model, folder)
    content, name, file = describe(folder), model.tokenizer, folder / "tokenizer.json"
    if not file.is_file() or name not in loaded:
        return f"{content}; its own tokenizer, if it has one, was not compared with {name}"
    own, given = load_backend(file), loaded[name].backend
    ids, new = (backend.get_vocab(with_added_tokens=False) for backend in (own, given))
    other = sorted(token for token in ids | new if ids.get(token) != new.get(token))
    texts = [backend.encode_batch(PROBES, add_special_tokens=False) for backend in (own, given)]
    other += [text for text, a, b in zip(PROBES, *texts, strict=True) if a.ids != b.ids]
    if other:
        raise InputError(
            f"{folder}: its own tokenizer is not {name}, which the run gives it: {len(other):,} "
            f"tokens and texts have other ids, {other[0]!r} first: give it its own in `tokenizers`"
        )
    return f"{content}; its own tokenizer is {name}"


def _timed(model: Model) -> str:
    """Of a model that is only timed nothing but its config was fetched."""
    check_sizes(model, folder_of(model))
    return "has the sizes of the configuration; only timed, without its weights"


def _corpus(corpus: HubCorpus | LocalCorpus) -> str:
    files, rows = survey_corpus(corpus)
    return f"{files:,} files, " + (f"{rows:,} rows" if rows is not None else "each opened")


def _task(task: Task, paper: bool) -> str:
    count = len(documents(task))
    if paper and (expected := DOCUMENTS.get(task.task, count)) != count:
        raise InputError(f"{count:,} documents, and the paper's protocol has {expected:,}")
    return f"{count:,} documents" + (f" ({task.note})" if task.note else "")
