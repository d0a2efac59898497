"""The documents of a task: from a local file of the same form, or from what was downloaded."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keycut.artefact import sha256
from keycut.config import Task
from keycut.config.evaluation import DATA_SETS
from keycut.data.sources import Source
from keycut.errors import InputError
from keycut.hub import resolve

# What each task reads of a document, besides what may be absent.
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

Document = dict[str, Any]


def source(task: Task, *, downloads: Path, lock: Path) -> Source:
    """Which data it is, without reading it: a file by its digest, a download by its commit."""
    if task.file is not None:
        return Source(Path(task.file).name, f"sha256:{sha256(_local(task))}")
    folder = _downloaded(task, downloads, lock)
    name, configuration, split = DATA_SETS[task.task]
    return Source("/".join(filter(None, [name, configuration, split])), folder.name)


def documents(task: Task, *, downloads: Path, lock: Path) -> list[Document]:
    """All of them, each with the fields that the task reads."""
    if task.file is not None:
        path = _local(task)
        numbered = _articles(path) if path.suffix == ".raw" else _lines(path)
        where = str(path)
    else:
        folder = _downloaded(task, downloads, lock)
        numbered = _rows(task, folder)
        where = str(folder)
    found = [_checked(task.task, document, place) for place, document in numbered]
    if not found:
        raise InputError(f"{where}: no documents for {task.task}: the data set is empty")
    return found


def _local(task: Task) -> Path:
    path = Path(str(task.file))
    if not path.is_file():
        raise InputError(f"{path}: no such file; it was to hold the data of {task.task}")
    if path.suffix not in (".jsonl", ".raw"):
        raise InputError(f"{path}: expected .jsonl, one document a line, or WikiText's .raw")
    if path.suffix == ".raw" and task.task != "wikitext":
        raise InputError(f"{path}: a .raw file is WikiText's; {task.task} takes .jsonl")
    return path


def _downloaded(task: Task, downloads: Path, lock: Path) -> Path:
    name, _, _ = DATA_SETS[task.task]
    try:
        return resolve(name, "dataset", downloads, lock, revision=task.revision)
    except InputError as error:
        raise InputError(f"the data of {task.task} is missing: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: not valid JSON ({error})") from None


def _articles(path: Path) -> Iterator[tuple[str, Document]]:
    """WikiText's articles. One begins with ` = Title = `; its sections have more equals signs."""
    lines = path.read_text(encoding="utf-8").split("\n")
    starts = [n for n, line in enumerate(lines) if re.fullmatch(r" *= [^=]+ = *", line)]
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        page = "\n".join(lines[start:end])
        if page.strip():
            yield f"{path}, line {start + 1}", {"page": page}


def _rows(task: Task, folder: Path) -> Iterator[tuple[str, Document]]:
    """A downloaded data set; its own card says which files its configurations and splits are."""
    import datasets

    _, configuration, split = DATA_SETS[task.task]
    with tempfile.TemporaryDirectory() as cache:
        try:
            rows = datasets.load_dataset(
                str(folder), name=configuration, split=split, cache_dir=cache
            )
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
            raise InputError(
                f"{folder}: {task.task} needs its split {split!r}"
                f"{f' of {configuration!r}' if configuration else ''}, which cannot be read: "
                f"{str(error).splitlines()[0]}"
            ) from None
        for number, row in enumerate(rows, start=1):
            yield f"{folder}, {split} row {number}", row


def _checked(task: str, document: Any, place: str) -> Document:
    if not isinstance(document, dict):
        raise InputError(f"{place}: a JSON object was expected")
    for field, kind in FIELDS[task].items():
        if field not in document:
            there = ", ".join(sorted(document))
            raise InputError(f"{place}: {task} needs the field {field!r}; it has {there}")
        if not isinstance(document[field], kind):
            raise InputError(
                f"{place}: field {field!r} is {type(document[field]).__name__}, "
                f"{task} expects {kind.__name__}"
            )
        if kind is list and not document[field]:
            raise InputError(f"{place}: field {field!r} is empty")
    return document
