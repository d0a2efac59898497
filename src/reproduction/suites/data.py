"""The documents of a task, from a local file or from a downloaded data set."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reproduction.config import Task
from reproduction.config.evaluation import DATA_SETS
from reproduction.suites.retrieval import TEXTS, Document
from statecut.data.sources import Source, json_lines
from statecut.errors import InputError
from statecut.files import sha256
from statecut.hub import resolve

# What each task reads of a document; other fields are ignored.
FIELDS: dict[str, dict[str, type]] = {
    "wikitext": {"page": str},
    "lambada_openai": {"text": str},
    "arc_easy": {"question": str, "choices": dict, "answerKey": str},
    "arc_challenge": {"question": str, "choices": dict, "answerKey": str},
    "hellaswag": {"ctx_a": str, "ctx_b": str, "activity_label": str, "endings": list, "label": str},
    "piqa": {"goal": str, "sol1": str, "sol2": str, "label": int},
    "winogrande": {"sentence": str, "option1": str, "option2": str, "answer": str},
    "based_drop": {"context": str, "question": str, "answers": list},
    "based_fda": {"text": str, "key": str, "value": str},
    "based_nq": {"context": str, "question": str, "answers": list},
    "based_squadv2": {"text": str, "value": str},
    "based_swde": {"text": str, "key": str, "value": str},
    "based_triviaqa": {"context": str, "question": str, "answers": list},
    "demo_prose": {"page": str},
    "demo_last_word": {"text": str},
    "demo_choice": {"query": str, "choices": list, "gold": int},
    "demo_recall": {"context": str, "question": str, "answers": list},
}
# What tasks whose text is cut around the answer read if a document has it: other names of the
# answer, and the place of its token.
OPTIONAL: dict[str, type] = {"alt_answers": list, "tok_pos": int}
# Whether a document has its right answer: splits without labels would be scored as wrong answers.
ANSWERED: dict[str, Callable[[Document], bool]] = {
    "arc_easy": lambda d: d["answerKey"] in d["choices"]["label"],
    "arc_challenge": lambda d: d["answerKey"] in d["choices"]["label"],
    "hellaswag": lambda d: d["label"] in map(str, range(len(d["endings"]))),
    "piqa": lambda d: d["label"] in (0, 1),
    "winogrande": lambda d: d["answer"] in ("1", "2") and "_" in d["sentence"],
    "demo_choice": lambda d: d["gold"] in range(len(d["choices"])),
    "based_drop": lambda d: any(d["answers"]),
    "based_triviaqa": lambda d: any(d["answers"]),
    "demo_recall": lambda d: any(d["answers"]),
}


def source(task: Task) -> Source:
    """Which data it is: a file by its digest, a download by its commit."""
    if task.file is not None:
        path, digest = _local(task)
        return Source(path.name, f"sha256:{digest}")
    folder = _downloaded(task)
    name, configuration, split = DATA_SETS[task.task]
    return Source("/".join(filter(None, [name, configuration, split])), folder.name)


def documents(task: Task) -> list[Document]:
    """All documents, checked, with the fields that the task reads."""
    if task.file is None:
        path = _downloaded(task)
        numbered = _rows(task, path)
    else:
        path, _ = _local(task)
        numbered = _articles(path) if path.suffix == ".raw" else json_lines(path)
    checked = [_checked(task.task, document, place) for place, document in numbered]
    if not checked:
        raise InputError(f"{path}: no documents for {task.task}: the data set is empty")
    return checked


def _local(task: Task) -> tuple[Path, str]:
    """The local file, and its sha256."""
    path = Path(str(task.file))
    if not path.is_file():
        raise InputError(f"{path}: no such file; it was to hold the data of {task.task}")
    if path.suffix not in (".jsonl", ".raw"):
        raise InputError(f"{path}: expected .jsonl, one document a line, or WikiText's .raw")
    if path.suffix == ".raw" and task.task != "wikitext":
        raise InputError(f"{path}: a .raw file is WikiText's; {task.task} takes .jsonl")
    digest = sha256(path)
    if task.sha256 not in (None, digest):
        raise InputError(
            f"{path}: its sha256 is {digest}, the configuration says {task.sha256} for {task.task}"
        )
    return path, digest


def _downloaded(task: Task) -> Path:
    name, _, _ = DATA_SETS[task.task]
    try:
        return resolve("dataset", name, revision=task.revision)
    except InputError as error:
        raise InputError(f"the data of {task.task} is missing: {error}") from None


def _articles(path: Path) -> Iterator[tuple[str, Document]]:
    """WikiText's articles. One begins with ` = Title = `; its sections have more equals signs."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error})") from None
    starts = [n for n, line in enumerate(lines) if re.fullmatch(r" *= [^=]+ = *", line)]
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        page = "\n".join(lines[start:end])
        if page.strip():
            yield f"{path}, line {start + 1}", {"page": page}


def _rows(task: Task, folder: Path) -> Iterator[tuple[str, Document]]:
    """A downloaded data set; its card says which files belong to a configuration and split."""
    import datasets

    datasets.disable_progress_bars()  # of seconds
    _, configuration, split = DATA_SETS[task.task]
    with tempfile.TemporaryDirectory() as cache:
        try:
            # Without a card, as on the hub's branch of converted files, a configuration is a
            # folder; `name` would load all of them as one.
            which: dict[str, Any] = {"name": configuration}
            if (folder / str(configuration)).is_dir() and not (folder / "README.md").is_file():
                which = {"data_dir": configuration}
            rows = datasets.load_dataset(str(folder), split=split, cache_dir=cache, **which)
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
            raise InputError(
                f"{folder}: {task.task} needs its split {split!r}"
                f"{f' of {configuration!r}' if configuration else ''}, which cannot be read: "
                f"{str(error).splitlines()[0]}"
            ) from None
        for number, row in enumerate(rows, start=1):
            yield f"{folder}, {split} row {number}", row


def _checked(task: str, document: Document, place: str) -> Document:
    """A document with the fields that the task reads; others may be anything."""
    fields = dict(FIELDS[task])
    if task in TEXTS and TEXTS[task].around:
        fields |= {f: kind for f, kind in OPTIONAL.items() if document.get(f) is not None}
    for field, kind in fields.items():
        if field not in document:
            names = ", ".join(sorted(document))
            raise InputError(f"{place}: {task} needs the field {field!r}; it has {names}")
        if not isinstance(value := document[field], kind):
            found = type(value).__name__
            raise InputError(f"{place}: field {field!r} is {found}, {kind.__name__} was expected")
    needed = {field: document[field] for field in fields}
    if not ANSWERED.get(task, bool)(needed):
        raise InputError(f"{place}: has no right answer among its choices: {str(needed)[:200]}")
    return needed
