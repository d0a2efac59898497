"""Checks that an evaluation is what its configuration states.

The settings of the protocol `paper` are repeated here, so that no edit of a configuration can
change them unnoticed. Whatever the protocol, the version and metric that a configuration states
for a task must be those of lm-eval's task file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reproduction.config import Evaluation, Suite, Task
from statecut.errors import InputError, nearest

# Window, the name of the mean, and for every column its task, metric and version.
PAPER: dict[str, tuple[int, str | None, dict[str, tuple[str, str, int]]]] = {
    "ppl": (
        10_000,
        None,
        {
            "wikitext_word_ppl": ("wikitext", "word_perplexity", 2),
            "lambada_ppl": ("lambada_openai", "perplexity", 1),
        },
    ),
    "zero_shot": (
        10_000,
        "zero_shot_avg",
        {
            "arc_easy_acc_norm": ("arc_easy", "acc_norm", 1),
            "arc_challenge_acc_norm": ("arc_challenge", "acc_norm", 1),
            "hellaswag_acc_norm": ("hellaswag", "acc_norm", 1),
            "winogrande_acc": ("winogrande", "acc", 1),
            "piqa_acc_norm": ("piqa", "acc_norm", 1),
            "lambada_acc": ("lambada_openai", "acc", 1),
        },
    ),
    "retrieval": (
        2_048,
        "retrieval_avg",
        {
            "drop_contains": ("based_drop", "contains", 1),
            "fda_contains": ("based_fda", "contains", 1),
            "nq_contains": ("based_nq", "contains", 1),
            "squad_contains": ("based_squadv2", "contains", 1),
            "swde_contains": ("based_swde", "contains", 1),
            "triviaqa_contains": ("based_triviaqa", "contains", 1),
        },
    ),
}

# Documents in the splits that lm-eval scores. Those of the retrieval sets were not counted.
DOCUMENTS = {
    "wikitext": 62,
    "lambada_openai": 5_153,
    "arc_easy": 2_376,
    "arc_challenge": 1_172,
    "hellaswag": 10_042,
    "winogrande": 1_267,
    "piqa": 1_838,
}


def check_protocol(evaluation: Evaluation, *names: str) -> None:
    """An error that names every setting of these suites, or of all, that is not the protocol's."""
    if evaluation.protocol != "paper":
        return
    suites = names or evaluation.suites
    deviations = [line for name in suites for line in _deviations(evaluation.suites[name], name)]
    if deviations:
        raise InputError(
            "the protocol `paper` is promised, but:\n  "
            + "\n  ".join(deviations)
            + "\nto evaluate like this, give evaluation.protocol another name: results carry it"
        )


def _deviations(suite: Suite, name: str) -> Iterator[str]:
    path = f"evaluation.suites.{name}"
    if name not in PAPER:
        yield f"{path}: the paper has no such suite{nearest(name, PAPER)}"
        return
    window, mean, columns = PAPER[name]
    if suite.window != window:
        yield f"{path}.window: {suite.window}, the paper's is {window}"
    if suite.mean != mean:
        yield f"{path}.mean: {suite.mean}, the paper's is {mean}"
    for column in sorted(suite.tasks.keys() ^ columns.keys()):
        problem = "is not the paper's" if column in suite.tasks else "is missing"
        yield f"{path}.tasks: {column} {problem}"
    for column, (task, metric, version) in columns.items():
        if column in suite.tasks:
            stated = suite.tasks[column]
            for field, paper in {
                "task": task,
                "metric": metric,
                "version": version,
                "shots": 0,
            }.items():
                value = getattr(stated, field)
                if value != paper:
                    yield f"{path}.tasks.{column}.{field}: {value}, the paper's is {paper}"
            # Data sets leave the hub. A file that replaces one is named next to its numbers.
            if stated.file is not None and stated.sha256 is None:
                yield (
                    f"{path}.tasks.{column}.file: {stated.file}: a local file is the paper's "
                    "protocol only with its `sha256`"
                )


def check_task_file(column: str, stated: Task, loaded: Mapping[str, Any]) -> None:
    """An error if lm-eval's task file is not what the configuration states."""
    version = loaded["metadata"]["version"]
    if float(version) != stated.version:
        raise InputError(
            f"{column}: version {stated.version} of {stated.task} is stated, "
            f"lm-eval would run version {version}"
        )
    metrics = [entry["metric"] for entry in loaded["metric_list"]]
    if stated.metric not in metrics:
        raise InputError(
            f"{column}: metric {stated.metric!r} of {stated.task} is stated, "
            f"lm-eval would report {', '.join(metrics)}"
        )
    if stated.shots:
        raise InputError(
            f"{column}: {stated.shots} examples in the prompt of {stated.task} are stated; "
            "tasks are run without"
        )
