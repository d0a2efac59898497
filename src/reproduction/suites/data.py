"""The documents of a task, from a local file or from a downloaded data set."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from reproduction.config import Task
from reproduction.config.evaluation import DATA_SETS
from reproduction.suites.retrieval import TEXTS, Document
from statecut.data.sources import Source, json_lines
from statecut.errors import InputError
from statecut.files import sha256
from statecut.hub.downloads import DOWNLOADS, Downloads

# What each task reads of a document; other fields are ignored. A list holds texts.
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


def source(task: Task, *, downloads: Downloads = DOWNLOADS) -> Source:
    """Which data it is: a file by its digest, a download by its commit."""
    if task.file is not None:
        path, digest = _local(task)
        return Source(path.name, f"sha256:{digest}")
    folder = _downloaded(task, downloads)
    name, configuration, split = DATA_SETS[task.task]
    return Source("/".join(filter(None, [name, configuration, split])), folder.name)


def documents(task: Task, *, downloads: Downloads = DOWNLOADS) -> list[Document]:
    """All documents, checked, with the fields that the task reads."""
    if task.file is None:
        path = _downloaded(task, downloads)
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


def _downloaded(task: Task, downloads: Downloads) -> Path:
    name, _, _ = DATA_SETS[task.task]
    try:
        return downloads.resolve("dataset", name, revision=task.revision)
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
        problem = _not_a(kind, document[field])
        if document[field] == [] and field not in OPTIONAL:
            problem = "is empty"
        if problem:
            raise InputError(f"{place}: field {field!r} {problem}")
    needed = {field: document[field] for field in fields}
    if problem := _contradiction(task, needed):
        raise InputError(f"{place}: {problem}")
    return needed


def _not_a(kind: type, value: Any) -> str | None:
    """Why a value is not of this type, if it is not."""
    # A bool is an int in Python, but no label.
    if not isinstance(value, kind) or isinstance(value, bool):
        return f"is {type(value).__name__}, {kind.__name__} was expected"
    if isinstance(value, list):
        problems = (_not_a(str, item) for item in value)
        return next((f"has an item that {problem}" for problem in problems if problem), None)
    # JSON can escape half of a surrogate pair, which cannot be encoded.
    if isinstance(value, str) and (lone := re.search("[\ud800-\udfff]", value)):
        return f"has half of a surrogate pair, {lone[0]!r}, which is no character"
    return None


def _contradiction(task: str, document: Document) -> str | None:
    """What is wrong with fields that each have the right type."""
    if task in ("arc_easy", "arc_challenge"):
        choices = {field: document["choices"].get(field) for field in ("text", "label")}
        for field, values in choices.items():
            if problem := _not_a(list, values):
                return f"field 'choices.{field}' {problem}"
        if len(choices["text"]) != len(choices["label"]):
            return f"it has {len(choices['text'])} choices with {len(choices['label'])} labels"
        document["choices"] = choices
        return _not_among(choices["label"], "answerKey", document)
    if task == "hellaswag":
        return _not_among([str(n) for n in range(len(document["endings"]))], "label", document)
    if task == "piqa":
        return _not_among([0, 1], "label", document)
    if task == "demo_choice":
        return _not_among(range(len(document["choices"])), "gold", document)
    if task == "winogrande":
        if "_" not in document["sentence"]:
            return f"field 'sentence' has no gap `_`: {document['sentence'][:60]!r}"
        return _not_among(["1", "2"], "answer", document)
    if task == "demo_last_word" and " " not in document["text"].strip():
        return f"field 'text' has no two words: {document['text'][:60]!r}"
    if "answers" in document:
        if not document["question"].strip():
            return "field 'question' is empty"
        # NQ's protocol leaves out what has no answer.
        if task != "based_nq" and not any(document["answers"]):
            return "field 'answers' has no answer that is not empty"
    return None


def _not_among(allowed: Collection[Any], field: str, document: Document) -> str | None:
    if (value := document[field]) in allowed:
        return None
    return f"field {field!r} is {value!r}, one of {', '.join(map(repr, allowed))} was expected"
