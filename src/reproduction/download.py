"""Whether what was downloaded is what the run needs, before a job finds out that it is not.

Hashes prove that files are those of the hub. Here they are opened: models must have the run's
sizes, the parameters of their class and the run's tokens, tasks their documents, corpora their
text. Of weights only the headers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from reproduction.config import Config, Model
from reproduction.config.needs import ONLY_TIMED, Need, hub_sources, needed_models, needs
from reproduction.corpora import make_tokenizer, survey_corpus
from reproduction.import_model import check_sizes, folder_of
from reproduction.suites.data import documents
from reproduction.suites.protocol import DOCUMENTS
from statecut.data.tokenizer import Tokenizer, check_vocabulary, load_backend
from statecut.errors import InputError, nearest
from statecut.hub import fetch, read_lock
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


def download_and_check(config: Config, *, update: Collection[str] = ()) -> tuple[str, str]:
    """Fetch all that a configuration needs, and open all of it: a table of what is there, and
    everything that is wrong, if anything is."""
    items = hub_sources(config)
    known = {item.name for item in items}
    if wrong := next((name for name in update if name not in known), None):
        raise InputError(f"cannot update {wrong}: not in the configuration{nearest(wrong, known)}")
    failures = fetch(items, update=update) if items else {}
    lock, rows, problems = read_lock(), [("item", "commit", "content")], []
    loaded: dict[str, Tokenizer] = {}
    for need in needs(config):
        item, hub = f"{need.kind} {need.name}", need.hub
        if hub and hub.key in failures:
            rows.append((item, "", "not downloaded"))
            continue
        commit = lock[f"{hub.kind}s"][hub.name]["commit"] if hub else "local"
        logger.info("looking into %s", item)
        try:
            rows.append((item, commit[:8], _content(config, need, loaded)))
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


def _content(config: Config, need: Need, loaded: dict[str, Tokenizer]) -> str:
    """What one thing holds."""
    match need.kind:
        case "tokenizer":
            return _tokenizer(config, need.name, loaded)
        case "model":
            only_timed = need.hub is not None and need.hub.patterns == ONLY_TIMED
            return _model(need.spec, None if only_timed else loaded)
        case "corpus":
            files, rows = survey_corpus(need.spec)
            return f"{files:,} files, " + (f"{rows:,} rows" if rows is not None else "each opened")
    task, count = need.spec, len(documents(need.spec))
    expected = DOCUMENTS.get(task.task, count)
    if config.evaluation.protocol == "paper" and expected != count:
        raise InputError(f"{count:,} documents, and the paper's protocol has {expected:,}")
    return f"{count:,} documents" + (f" ({task.note})" if task.note else "")


def _tokenizer(config: Config, name: str, loaded: dict[str, Tokenizer]) -> str:
    with TemporaryDirectory() as out:
        tokenizer = make_tokenizer(config, name, Path(out) / name)
    for model in needed_models(config).values():
        if model.tokenizer == name:
            check_vocabulary(tokenizer, model.vocab_size)
    loaded[name] = tokenizer
    return f"{tokenizer.vocabulary_size:,} tokens"


def _model(model: Model, loaded: dict[str, Tokenizer] | None) -> str:
    """Its sizes, its parameters, and whether its own tokenizer gives the ids of the run's."""
    folder = folder_of(model)
    check_sizes(model, folder)
    if loaded is None:
        return "has the sizes of the configuration; only timed, without its weights"
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
