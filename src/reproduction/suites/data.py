"""The documents of a task, from a local file or from a downloaded data set."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.config import Task
from reproduction.config.evaluation import DATA_SETS
from reproduction.suites.retrieval import Document
from statecut.data.sources import Source, json_lines
from statecut.errors import InputError
from statecut.files import sha256
from statecut.hub import resolve


class Form(NamedTuple):
    """What a task reads of a document, and whether the document has its right answer: those of
    splits without labels would be scored as wrong answers."""

    fields: dict[str, type]
    answered: Callable[[Document], bool] = bool


PAGE, TEXT = Form({"page": str}), Form({"text": str})
ARC = Form(
    {"question": str, "choices": dict, "answerKey": str},
    lambda d: d["answerKey"] in d["choices"]["label"],
)
QUESTION = Form({"context": str, "question": str, "answers": list}, lambda d: any(d["answers"]))
KEY = Form({"text": str, "key": str, "value": str})
FORMS = {
    "wikitext": PAGE,
    "lambada_openai": TEXT,
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "hellaswag": Form(
        {"ctx_a": str, "ctx_b": str, "activity_label": str, "endings": list, "label": str},
        lambda d: d["label"] in map(str, range(len(d["endings"]))),
    ),
    "piqa": Form(
        {"goal": str, "sol1": str, "sol2": str, "label": int}, lambda d: d["label"] in (0, 1)
    ),
    "winogrande": Form(
        {"sentence": str, "option1": str, "option2": str, "answer": str},
        lambda d: d["answer"] in ("1", "2") and "_" in d["sentence"],
    ),
    "based_drop": QUESTION,
    "based_fda": KEY,
    "based_nq": Form(QUESTION.fields),  # in which what has no answer is left out
    "based_squadv2": Form({"text": str, "value": str}),
    "based_swde": KEY,
    "based_triviaqa": QUESTION,
    "demo_prose": PAGE,
    "demo_last_word": TEXT,
    "demo_choice": Form({"query": str, "choices": list, "gold": int}),
    "demo_recall": QUESTION,
}
# What else retrieval tasks read if a document has it: other names of the answer, and the place of
# its token.
OPTIONAL: dict[str, type] = {"alt_answers": list, "tok_pos": int}


def source(task: Task) -> Source:
    """Which data it is: a file by its digest, a download by its commit."""
    if task.file is None:
        return Source("/".join(filter(None, DATA_SETS[task.task])), _downloaded(task).name)
    digest = sha256(task.file)
    if task.sha256 not in (None, digest):
        raise InputError(
            f"{task.file}: its sha256 is {digest}, the configuration says {task.sha256} for "
            f"{task.task}"
        )
    return Source(Path(task.file).name, f"sha256:{digest}")


def documents(task: Task) -> list[Document]:
    """All documents, checked, with the fields that the task reads."""
    source(task)  # is what it should be
    if task.file is None:
        rows = _rows(task, _downloaded(task))
    else:
        path = Path(task.file)
        rows = _articles(path) if path.suffix == ".raw" else json_lines(path)
    checked = [_checked(task.task, document, place) for place, document in rows]
    if not checked:
        raise InputError(f"no documents for {task.task}: {task.file or 'the data set'} is empty")
    return checked


def _downloaded(task: Task) -> Path:
    return resolve("dataset", DATA_SETS[task.task][0], revision=task.revision)


def _articles(path: Path) -> Iterator[tuple[str, Document]]:
    """WikiText's articles. One begins with ` = Title = `; its sections have more equals signs."""
    lines = path.read_text(encoding="utf-8").split("\n")
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
    # Without a card, as on the hub's branch of converted files, a configuration is a folder;
    # `name` would load all of them as one.
    which: dict[str, Any] = {"name": configuration}
    if (folder / str(configuration)).is_dir() and not (folder / "README.md").is_file():
        which = {"data_dir": configuration}
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset(str(folder), split=split, cache_dir=cache, **which)
        for number, row in enumerate(rows, start=1):
            yield f"{folder}, {split} row {number}", row


def _checked(task: str, document: Document, place: str) -> Document:
    """A document with the fields that the task reads; others may be anything."""
    fields, answered = FORMS[task]
    fields = fields | {
        field: kind for field, kind in OPTIONAL.items() if document.get(field) is not None
    }
    for field, kind in fields.items():
        if not isinstance(document.get(field), kind):
            raise InputError(
                f"{place}: {task} needs the field {field!r} of type {kind.__name__}; the document "
                f"is {str(document)[:200]}"
            )
    needed = {field: document[field] for field in fields}
    if not answered(needed):
        raise InputError(f"{place}: has no right answer among its choices: {str(needed)[:200]}")
    return needed
