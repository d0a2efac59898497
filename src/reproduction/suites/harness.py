"""Tasks of lm-eval: their files, and their metrics of a model on documents."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.task
import lm_eval.utils
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from reproduction.suites.data import Document
from reproduction.suites.language_model import LanguageModel
from reproduction.suites.statistics import spread
from statecut.files import digest, sha256

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


def task_file(name: str) -> dict[str, Any]:
    """A task file as lm-eval reads it, ours or one that lm-eval ships."""
    return load_yaml(_path(name))


def task_digest(name: str) -> str:
    """The digest of a task file, and of what it includes and calls of lm-eval."""
    path = _path(name)
    if name in SHIPPED:
        files = [file for file in path.parent.iterdir() if file.suffix in (".yaml", ".py")]
    else:
        files = [path, *OURS.glob("_*.yaml")]
    return digest({file.name: sha256(file) for file in files})


def _path(name: str) -> Path:
    shipped = Path(lm_eval.__file__).parent / "tasks"
    return shipped / SHIPPED[name] if name in SHIPPED else OURS / f"{name}.yaml"


@lru_cache
def set_up_lm_eval() -> None:
    """No warnings of options that are not ours, and no bars for what takes seconds.

    lm-eval 0.4.13 compiles the template of a task for each of its documents, which takes longer
    than to score them; here it does so once. Upstream issue: none known. Goes when
    `lm_eval.utils.apply_template` caches its templates.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda items, **_: items
    lm_eval.utils.env.from_string = lru_cache(lm_eval.utils.env.from_string)


def make_task(name: str, documents: list[Document]) -> ConfigurableTask:
    """lm-eval's task on these documents, whatever split they came from."""
    set_up_lm_eval()
    config = task_file(name)
    rows = datasets.Dataset.from_list(documents)
    # lm-eval would process them again each time it reads the documents.
    if process := config.pop("process_docs", None):
        rows = process(rows)
    return ConfigurableTask(
        config={
            **{key: value for key, value in config.items() if key not in ("tag", "group")},
            "custom_dataset": lambda **_: {"test": rows},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "num_fewshot": 0,
        }
    )


def measure(lm: LanguageModel, name: str, documents: list[Document]) -> Record:
    """Every metric of a task: its value, its standard error, and its value on draws of documents.

    The values are those of lm-eval's evaluator, which does more with each document than these
    tasks need. A model with a logit that is not finite has NaN for all of them.
    """
    task = make_task(name, documents)
    task.build_all_requests()
    lm.non_finite = False
    answers = getattr(lm, task.instances[0].request_type)(task.instances, disable_tqdm=True)
    scored = list(task.eval_docs)
    by_document: list[list[Any]] = [[] for _ in scored]
    for instance, answer in zip(task.instances, answers, strict=True):
        by_document[instance.doc_id].append(answer)
    samples = list(map(task.process_results, scored, by_document))
    metrics = {}
    for metric in samples[0]:
        items = [sample[metric] for sample in samples]
        value, error, draws = math.nan, None, None
        if not lm.non_finite:
            value, (error, draws) = task.aggregation()[metric](items), spread(metric, items)
        metrics[metric] = {"value": float(value), "stderr": error, "draws": draws}
    return {
        "task": name,
        "version": task.VERSION,
        "sha256": task_digest(name),
        "shots": task.config.num_fewshot,
        "documents": len(samples),
        "metrics": metrics,
    }
