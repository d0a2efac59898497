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
from reproduction.suites.harness import (
    Record,
    Requests,
    make_requests,
    measure,
    task_digest,
    task_file,
)
from reproduction.suites.language_model import Encoder, LanguageModel
from reproduction.suites.protocol import check_task_file
from reproduction.suites.statistics import RESAMPLES, SEED
from statecut.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from statecut.files import atomic_write, canonical_json, digest, read_json, write_json
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
    dtype: torch.dtype | None = None,
) -> Record:
    """Write `out`: every number of a suite for the model in a folder, and what they came from.

    Errors in configuration and data are found before the model is loaded. `cache` is a folder that
    keeps finished tasks, for an evaluation that was killed and for other suites with the same task,
    and requests of tasks, for other models. It does not know the code: other code needs another
    folder. `dtype` is by default the model's `compute_dtype`: bfloat16 on a GPU, as in the paper.
    """
    spec = config.evaluation.suites[suite]
    attempted = {column: task for column, task in spec.tasks.items() if not task.not_attempted}
    for column, task in attempted.items():
        check_task_file(column, task, task_file(task.task))
    checkpoint = Checkpoint(model)
    dtype = dtype or checkpoint.compute_dtype(device)
    tokenizer = load_tokenizer(model)
    conditions = _conditions(checkpoint, tokenizer, spec, device, dtype)
    with TemporaryDirectory() as scratch:
        kept = Path(cache or scratch)
        paths: dict[str, Path] = {}
        pending: dict[Path, tuple[Record, Requests]] = {}
        for column, task in attempted.items():
            known = {
                "task": task.task,
                "sha256": task_digest(task.task),
                "source": asdict(data.source(task)),
            }
            path = paths[column] = kept / _name(task.task, known | conditions)
            if path not in pending and not path.is_file():  # two columns may be of one task
                shared = {key: conditions[key] for key in ("window", "tokenizer", "versions")}
                pending[path] = known, _requests(task, tokenizer, known | shared, kept)
        if pending:
            lm = LanguageModel(model, spec.window, spec.batch, device, dtype, tokenizer)
            for path, (known, requests) in pending.items():
                record = measure(lm, known["task"], requests)
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


def _conditions(
    checkpoint: Checkpoint, tokenizer: Tokenizer, spec: Suite, device: str, dtype: torch.dtype
) -> Record:
    """What the numbers of all tasks of a suite depend on, besides the code."""
    check_vocabulary(tokenizer, checkpoint.text_config["vocab_size"])
    return {
        "window": spec.window,
        "batch": spec.batch,
        "model": checkpoint.digest(),
        "tokenizer": tokenizer.digest,
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "bootstrap": {"resamples": RESAMPLES, "seed": SEED},
        "versions": {
            "statecut": statecut.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
    }


def _name(task: str, known: Record) -> str:
    return f"{task}-{digest(known)[:24]}.json"


def _requests(task: Task, tokenizer: Tokenizer, known: Record, cache: Path) -> Requests:
    """Those of a task, kept for all models: making them takes longer than a small model needs."""
    encoder = Encoder(tokenizer)
    # The token before a text is not part of the tokenizer's digest.
    prefix = {"prefix": encoder.prefix_token_id}
    path = cache / "requests" / _name(task.task, known | prefix)
    if path.is_file():
        return Requests(**read_json(path))
    documents = data.documents(task)
    if task.task in retrieval.TEXTS:
        documents = retrieval.cut(documents, task.task, tokenizer, known["window"])
    requests = make_requests(task.task, documents, encoder)
    with atomic_write(path, force=True) as aside:
        aside.write_text(canonical_json(vars(requests)))
    return requests


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
    known = all(error is not None for error in errors)
    return {
        "value": sum(column["value"] for column in columns) / len(columns),
        "stderr": math.hypot(*errors) / len(columns) if known else None,
    }
