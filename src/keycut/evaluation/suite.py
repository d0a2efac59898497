"""One model on one suite: from a folder to one JSON."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.utils
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

import keycut
from keycut.artefact import (
    atomic_write,
    canonical_json,
    check_writable,
    digest,
    read_json,
    sha256,
    write_json,
)
from keycut.config import Config, Suite, Task
from keycut.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from keycut.errors import InputError, nearest
from keycut.evaluation import data, retrieval
from keycut.evaluation.language_model import Encoder, LanguageModel
from keycut.evaluation.protocol import refuse_deviations, refuse_drift
from keycut.evaluation.statistics import RESAMPLES, SEED, kept_draws, standard_error
from keycut.hub.downloads import DOWNLOADS, Downloads
from keycut.models.checkpoint import Checkpoint

Record = dict[str, Any]

OURS = Path(__file__).parent / "tasks"
# Only the files we need: to index all that lm-eval ships takes eleven seconds.
SHIPPED = {
    "wikitext": "wikitext/wikitext.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
}
VERSIONED = (
    "datasets",
    "flash-linear-attention",
    "lm-eval",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
)
# What the code of a result is, as far as it is ours.
CODE = ("evaluation/*.py", "evaluation/tasks/*.yaml", "models/*.py", "data/tokenizer.py")
# What the requests of a task depend on, of what its numbers do.
ASKED_BY = ("window", "tokenizer", "versions", "code", "task", "sha256", "data")


@dataclass(frozen=True)
class Requests:
    """What a task asks of a model, whichever model it is."""

    kind: str  # as lm-eval calls the method that answers it
    documents: list[data.Document]  # as lm-eval scores them
    arguments: list[list[Any]]  # those of every request about a document, for each document


@dataclass(frozen=True)
class Job:
    """One task on one model, and all that its numbers depend on."""

    task: str
    identity: dict[str, Any]
    requests: Requests | None  # None: its record is in the cache

    @property
    def record(self) -> str:
        return f"{self.task}-{digest(self.identity)[:24]}.json"


def evaluate(
    model: Path | str,
    suite: str,
    config: Config,
    out: Path | str,
    *,
    cache: Path | str | None = None,
    downloads: Downloads = DOWNLOADS,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Record:
    """Write `out`: every number of a suite for the model in a folder, and what they came from.

    Whatever can be wrong with configuration and data is found before the model is loaded. Tasks
    that are finished stay in `cache`, so that a killed evaluation, or another suite with the same
    task, goes on from them; what a task asks stays there, too, for other models. `dtype` is by
    default bfloat16 on a GPU, as in the paper, and the model's own on a CPU.
    """
    out = check_writable(out)
    spec = _named(config, suite)
    refuse_deviations(config.evaluation, suite)
    cache = Path(cache or Path("results") / config.run / ".checkpoints" / "evaluation")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (None if device == "cpu" else torch.bfloat16)
    tokenizer = load_tokenizer(model)
    common = _common(Checkpoint(model), tokenizer, spec, device, dtype)
    jobs = {}
    for column, task in spec.tasks.items():
        if not task.not_attempted:
            refuse_drift(column, task, task_file(task.task))
            jobs[column] = _job(task, common, tokenizer, cache, downloads)
    if not jobs:
        raise InputError(f"suite {suite!r}: none of its tasks is attempted")

    load = partial(
        LanguageModel, model, window=spec.window, batch=spec.batch, device=device, dtype=dtype,
        words=tokenizer,
    )  # fmt: skip
    _run(jobs.values(), cache, load)
    records = {column: read_json(cache / job.record) for column, job in jobs.items()}
    result = {
        "suite": suite,
        "protocol": config.evaluation.protocol,
        **common,
        "results": _columns(spec, records),
        "tasks": {
            column: {key: value for key, value in record.items() if key != "metrics"}
            for column, record in records.items()
        },
    }
    write_json(out, result)
    return result


def measure(lm: LM, name: str, requests: Requests) -> Record:
    """What a task says of a model: every metric with its value, its standard error, and its value
    on some draws of the documents.

    The numbers are those of lm-eval's evaluator, which does more with every document than these
    tasks have use for. The numbers of a model whose logits are no numbers are none either.
    """
    task = make_task(name, requests.documents[:1], processed=True)  # one has the form of all
    lm.broken = False
    asked = list(zip(requests.documents, requests.arguments, strict=True))
    instances = [
        Instance(requests.kind, document, tuple(arguments), index, (name, number, 1))
        for number, (document, several) in enumerate(asked)
        for index, arguments in enumerate(several)
    ]
    answers = iter(getattr(lm, requests.kind)(instances))
    samples = [
        task.process_results(document, [next(answers) for _ in several])
        for document, several in asked
    ]
    return {
        "task": name,
        "version": task.VERSION,
        "sha256": task_digest(name),
        "shots": task.config.num_fewshot,
        "documents": len(samples),
        "metrics": {
            metric: _measured(lm, metric, task.aggregation()[metric], samples)
            for metric in samples[0]
        },
    }


def _measured(
    lm: LM, metric: str, aggregate: Callable[[list[Any]], Any], samples: list[Record]
) -> Record:
    if lm.broken:
        return {"value": math.nan, "stderr": None, "draws": None}
    items = [sample[metric] for sample in samples]
    return {
        "value": float(aggregate(items)),
        "stderr": standard_error(metric, items),
        "draws": kept_draws(metric, items),
    }


def make_requests(
    name: str, documents: list[data.Document], encoder: Encoder | None = None
) -> Requests:
    """What lm-eval's task asks about these documents, in tokens if there is an encoder."""
    task = make_task(name, documents)
    task.build_all_requests()
    instances = task.instances
    kind = instances[0].request_type
    encoded = getattr(encoder, kind)(instances) if encoder else [one.args for one in instances]
    processed = list(task.eval_docs)
    arguments: list[list[Any]] = [[] for _ in processed]
    for instance, values in zip(instances, encoded, strict=True):
        arguments[instance.doc_id].append(values)
    return Requests(kind, processed, arguments)


def make_task(
    name: str, documents: list[data.Document], *, processed: bool = False
) -> ConfigurableTask:
    """lm-eval's task on these documents, whatever split they came from."""
    _quiet_and_quick()
    config = task_file(name)
    given = datasets.Dataset.from_list(documents)
    # lm-eval would do this again whenever it asks for the documents.
    process = config.pop("process_docs", None)
    if process and not processed:
        given = process(given)
    return ConfigurableTask(
        config={
            **{key: value for key, value in config.items() if key not in ("tag", "group")},
            "custom_dataset": partial(_given, given),
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "num_fewshot": 0,
        }
    )


@lru_cache
def _quiet_and_quick() -> None:
    """lm-eval advises on options that are not ours, draws bars for what takes a second, and
    compiles the template of a task for each of its documents, which takes longer than scoring."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda items, **_: items
    lm_eval.utils.env.from_string = lru_cache(lm_eval.utils.env.from_string)


def _given(documents: datasets.Dataset, **_metadata: Any) -> dict[str, datasets.Dataset]:
    return {"test": documents}


def task_file(name: str) -> dict[str, Any]:
    """A task file as lm-eval reads it, ours or the one that it ships."""
    loaded: dict[str, Any] = load_yaml(_path(name))
    return loaded


def task_digest(name: str) -> str:
    """The digest of a task file and of what it includes and calls."""
    path = _path(name)
    if name in SHIPPED:
        beside = [file for file in path.parent.iterdir() if file.suffix in (".yaml", ".py")]
    else:
        beside = [path, *OURS.glob("_*.yaml"), Path(retrieval.__file__)]
    return digest({file.name: sha256(file) for file in beside})


def _path(name: str) -> Path:
    shipped = Path(lm_eval.__file__).parent / "tasks"
    path = shipped / SHIPPED[name] if name in SHIPPED else OURS / f"{name}.yaml"
    if not path.is_file():
        known = [*SHIPPED, *(file.stem for file in OURS.glob("[!_]*.yaml"))]
        raise InputError(f"task {name!r}: there is no such task{nearest(name, known)}")
    return path


def versions() -> dict[str, str]:
    return {
        "keycut": keycut.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in VERSIONED},
    }


def _installed(package: str) -> str:
    """Its version. A package that is on the path but was not installed there does not tell."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def code() -> str:
    """The digest of the source that a result depends on."""
    root = Path(keycut.__file__).parent
    files = sorted(file for pattern in CODE for file in root.glob(pattern))
    return digest({file.relative_to(root).as_posix(): sha256(file) for file in files})


def _named(config: Config, suite: str) -> Suite:
    suites = config.evaluation.suites
    if suite not in suites:
        raise InputError(f"suite {suite!r} is none of {config.run}{nearest(suite, suites)}")
    return suites[suite]


def _common(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    spec: Suite,
    device: str,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """What the numbers of every task depend on."""
    check_vocabulary(tokenizer, checkpoint.config["vocab_size"])
    return {
        "window": spec.window,
        "batch": spec.batch,
        "model": checkpoint.digest(),
        "tokenizer": tokenizer.digest,
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        "dtype": str(dtype or checkpoint.dtype).removeprefix("torch."),
        "bootstrap": {"resamples": RESAMPLES, "seed": SEED},
        "versions": versions(),
        "code": code(),
    }


def _job(
    task: Task,
    common: Mapping[str, Any],
    tokenizer: Tokenizer,
    cache: Path,
    downloads: Downloads,
) -> Job:
    where = data.source(task, downloads=downloads)
    identity = {
        **common,
        "task": task.task,
        "sha256": task_digest(task.task),
        "data": {"name": where.name, "revision": where.revision},
    }
    job = Job(task.task, identity, None)
    if (cache / job.record).is_file():
        return job
    return Job(task.task, identity, _requests(task, identity, tokenizer, cache, downloads))


def _requests(
    task: Task,
    identity: Mapping[str, Any],
    tokenizer: Tokenizer,
    cache: Path,
    downloads: Downloads,
) -> Requests:
    """What a task asks, kept for all models: to make it takes longer than a small model takes to
    answer it."""
    encoder = Encoder(tokenizer)
    # Not in tokenizer.json: what stands before a text.
    asked_by = {key: identity[key] for key in ASKED_BY} | {"prefix": encoder.prefix_token_id}
    kept = cache / "requests" / f"{task.task}-{digest(asked_by)[:24]}.json"
    if kept.is_file():
        return Requests(**read_json(kept))
    documents = data.documents(task, downloads=downloads)
    if task.task in retrieval.TEXTS:
        documents = retrieval.cut(documents, task.task, tokenizer, identity["window"])
        if not documents:
            raise InputError(
                f"{identity['data']['name']}: no document of {task.task} has an answer to look for"
            )
    requests = make_requests(task.task, documents, encoder)
    with atomic_write(kept, force=True) as aside:
        aside.write_text(canonical_json(vars(requests)))
    return requests


def _run(jobs: Iterable[Job], cache: Path, load: Callable[[], LanguageModel]) -> None:
    """Leave a record of every job in the cache. A model is loaded only if one is missing."""
    lm = None
    for job in jobs:
        # Asked again for each: two columns may be of one task.
        if not (cache / job.record).is_file():
            assert job.requests is not None
            lm = lm or load()
            record = measure(lm, job.task, job.requests)
            write_json(cache / job.record, {**record, "data": job.identity["data"]})


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
    """Of tasks that share no document, so their errors are independent."""
    errors = [column["stderr"] for column in columns]
    known = all(error is not None for error in errors)
    return {
        "value": sum(column["value"] for column in columns) / len(columns),
        "stderr": math.hypot(*errors) / len(columns) if known else None,
    }
