"""One model on one suite: from a folder to one JSON."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import statecut
from reproduction.config import Config, Suite, Task
from reproduction.suites import data, retrieval
from reproduction.suites.harness import Record, measure, task_digest, task_file
from reproduction.suites.language_model import LanguageModel
from reproduction.suites.protocol import check_task_file
from reproduction.suites.retrieval import Document
from reproduction.suites.statistics import RESAMPLES, SEED
from statecut.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from statecut.files import digest, read_json, write_json
from statecut.models.checkpoint import Checkpoint

PACKAGES = (
    "datasets",
    "flash-linear-attention",
    "lm-eval",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
)


def evaluate(
    model: Path | str,
    suite: str,
    config: Config,
    out: Path | str,
    *,
    cache: Path | str | None = None,
    device: str = "cpu",
) -> Record:
    """Write `out`: every number of a suite for the model in a folder, and what they came from.

    Errors in configuration and data are found before the model is loaded. `cache` is a folder that
    keeps finished tasks, for an evaluation that was killed and for other suites with the same task.
    It does not know the code: other code needs another folder. On a GPU it is computed in bfloat16,
    as in the paper.
    """
    spec = config.evaluation.suites[suite]
    attempted = {column: task for column, task in spec.tasks.items() if not task.not_attempted}
    for column, task in attempted.items():
        check_task_file(column, task, task_file(task.task))
    checkpoint = Checkpoint(model)
    dtype = checkpoint.compute_dtype(device)
    tokenizer = load_tokenizer(model)
    check_vocabulary(tokenizer, checkpoint.text_config["vocab_size"])
    conditions = {  # what the numbers of all tasks depend on, besides the code
        "window": spec.window,
        "batch": spec.batch,
        "model": checkpoint.digest(),
        "tokenizer": tokenizer.digest,
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "bootstrap": {"resamples": RESAMPLES, "seed": SEED},
        **({"documents": spec.documents} if spec.documents else {}),
        "versions": {
            "statecut": statecut.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
    }
    with TemporaryDirectory() as scratch:
        paths: dict[str, Path] = {}
        pending: dict[Path, tuple[Record, list[Document]]] = {}
        for column, task in attempted.items():
            source = asdict(data.source(task))
            known = {"task": task.task, "sha256": task_digest(task.task), "source": source}
            name = f"{task.task}-{digest(known | conditions)[:24]}.json"
            path = paths[column] = Path(cache or scratch) / name
            if path not in pending and not path.is_file():  # two columns may be of one task
                pending[path] = known, _documents(task, tokenizer, spec)
        if pending:
            lm = LanguageModel(model, spec.window, spec.batch, device, dtype)
            for path, (known, documents) in pending.items():
                record = measure(lm, known["task"], documents)
                write_json(path, {**record, "data": known["source"]})
        records = {column: read_json(path) for column, path in paths.items()}
    result = {
        "suite": suite,
        "protocol": config.evaluation.protocol,
        **conditions,
        "results": _columns(spec, records),
        "tasks": {
            column: {key: value for key, value in record.items() if key != "metrics"}
            for column, record in records.items()
        },
    }
    write_json(out, result)
    return result


def _documents(task: Task, tokenizer: Tokenizer, suite: Suite) -> list[Document]:
    documents = data.documents(task)[: suite.documents]
    if task.task in retrieval.TEXTS:
        return retrieval.cut(documents, task.task, tokenizer, suite.window)
    return documents


def _columns(spec: Suite, records: Mapping[str, Record]) -> Record:
    columns: Record = {}
    for column in spec.columns:
        if reason := spec.left_out(column):
            columns[column] = {"not_attempted": reason}
        elif column == spec.mean:
            columns[column] = _mean([columns[task] for task in spec.tasks])
        else:
            task, record = spec.tasks[column], records[column]
            columns[column] = {
                "task": task.task,
                "metric": task.metric,
                **record["metrics"][task.metric],
                **({"note": task.note} if task.note else {}),
            }
    return columns


def _mean(columns: list[Record]) -> Record:
    """The tasks share no document, so their errors are independent."""
    errors = [column["stderr"] for column in columns]
    error = None if None in errors else math.hypot(*errors) / len(columns)
    return {"value": sum(column["value"] for column in columns) / len(columns), "stderr": error}
