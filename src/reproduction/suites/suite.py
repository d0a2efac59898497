"""One model on one suite: from a folder to one JSON."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
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
from reproduction.suites.protocol import check_protocol, check_task_file
from reproduction.suites.statistics import RESAMPLES, SEED
from statecut.data.sources import Source
from statecut.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from statecut.errors import InputError
from statecut.files import (
    atomic_write,
    canonical_json,
    check_writable,
    digest,
    read_json,
    write_json,
)
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


@dataclass(frozen=True)
class Conditions:
    """What the numbers of all tasks of a suite depend on, besides the code."""

    window: int
    batch: int | None
    model: str  # digest
    tokenizer: str  # digest
    device: str
    dtype: str
    bootstrap: dict[str, int]
    versions: dict[str, str]


@dataclass(frozen=True)
class TaskRun:
    """One task on one model, known by all that its numbers depend on."""

    task: str
    sha256: str
    source: Source
    conditions: Conditions

    @property
    def record_name(self) -> str:
        return f"{self.task}-{digest(asdict(self))[:24]}.json"

    def requests_name(self, prefix: int) -> str:
        """Requests depend on less, so models share them. `prefix`: the token before a text, which
        is not part of the tokenizer's digest."""
        shared = {key: getattr(self.conditions, key) for key in ("window", "tokenizer", "versions")}
        known = asdict(self) | {"conditions": shared, "prefix": prefix}
        return f"requests/{self.task}-{digest(known)[:24]}.json"


def evaluate(
    model: Path | str,
    suite: str,
    config: Config,
    out: Path | str,
    *,
    cache: Path | str | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Record:
    """Write `out`: every number of a suite for the model in a folder, and what they came from.

    Errors in configuration and data are found before the model is loaded. `cache` is a folder that
    keeps finished tasks, for an evaluation that was killed and for other suites with the same task,
    and requests of tasks, for other models. It does not know the code: other code needs another
    folder. `dtype` is by default the model's `compute_dtype`: bfloat16 on a GPU, as in the paper.
    """
    out = check_writable(out)
    spec = config.evaluation.suites[suite]
    check_protocol(config.evaluation, suite)
    attempted = {column: task for column, task in spec.tasks.items() if not task.not_attempted}
    for column, task in attempted.items():
        check_task_file(column, task, task_file(task.task))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = Checkpoint(model)
    dtype = dtype or checkpoint.compute_dtype(device)
    tokenizer = load_tokenizer(model)
    conditions = _conditions(checkpoint, tokenizer, spec, device, dtype)
    with TemporaryDirectory() as scratch:
        kept = Path(cache or scratch)
        paths, pending = {}, {}
        for column, task in attempted.items():
            source = data.source(task)
            run = TaskRun(task.task, task_digest(task.task), source, conditions)
            path = paths[column] = kept / run.record_name
            if path not in pending and not path.is_file():  # two columns may be of one task
                pending[path] = run, _requests(run, task, tokenizer, kept)
        if pending:
            lm = LanguageModel(
                model,
                window=spec.window,
                batch=spec.batch,
                device=device,
                dtype=dtype,
                tokenizer=tokenizer,
            )
            for path, (run, requests) in pending.items():
                record = measure(lm, run.task, requests)
                write_json(path, {**record, "data": asdict(run.source)})
        records = {column: read_json(path) for column, path in paths.items()}
    result = {
        "suite": suite,
        "protocol": config.evaluation.protocol,
        **asdict(conditions),
        "results": _columns(spec, records),
        "tasks": {
            column: {key: value for key, value in record.items() if key != "metrics"}
            for column, record in records.items()
        },
    }
    write_json(out, result)
    return result


def _conditions(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    spec: Suite,
    device: str,
    dtype: torch.dtype,
) -> Conditions:
    check_vocabulary(tokenizer, checkpoint.text_config["vocab_size"])
    return Conditions(
        window=spec.window,
        batch=spec.batch,
        model=checkpoint.digest(),
        tokenizer=tokenizer.digest,
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        bootstrap={"resamples": RESAMPLES, "seed": SEED},
        versions=versions(),
    )


def versions() -> dict[str, str]:
    return {
        "statecut": statecut.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in PACKAGES},
    }


def _installed(package: str) -> str:
    """Its version; a package that is on the path but was not installed has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _requests(run: TaskRun, task: Task, tokenizer: Tokenizer, cache: Path) -> Requests:
    """Those of a task, kept for all models: making them takes longer than a small model needs."""
    encoder = Encoder(tokenizer)
    path = cache / run.requests_name(encoder.prefix_token_id)
    if path.is_file():
        return Requests(**read_json(path))
    documents = data.documents(task)
    if task.task in retrieval.TEXTS:
        documents = retrieval.cut(documents, task.task, tokenizer, run.conditions.window)
        if not documents:
            raise InputError(
                f"{run.source.name}: no document of {task.task} has an answer to look for"
            )
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
