"""Checks that an evaluation is what its configuration states.

The settings of the protocol `paper` are repeated here, so that no edit of a configuration can
change them unnoticed. Whatever the protocol, the version that a configuration states for a task
must be that of lm-eval's task file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduction.config import Evaluation, Suite, Task
from statecut.errors import InputError

# The window of each suite and the name of its mean; then the task, metric and version of each
# column. Prompts have no examples.
SUITES: dict[str, tuple[int, str | None]] = {
    "ppl": (10_000, None),
    "zero_shot": (10_000, "zero_shot_avg"),
    "retrieval": (2_048, "retrieval_avg"),
}
COLUMNS: dict[tuple[str, str], tuple[str, str, int]] = {
    ("ppl", "wikitext_word_ppl"): ("wikitext", "word_perplexity", 2),
    ("ppl", "lambada_ppl"): ("lambada_openai", "perplexity", 1),
    ("zero_shot", "arc_easy_acc_norm"): ("arc_easy", "acc_norm", 1),
    ("zero_shot", "arc_challenge_acc_norm"): ("arc_challenge", "acc_norm", 1),
    ("zero_shot", "hellaswag_acc_norm"): ("hellaswag", "acc_norm", 1),
    ("zero_shot", "winogrande_acc"): ("winogrande", "acc", 1),
    ("zero_shot", "piqa_acc_norm"): ("piqa", "acc_norm", 1),
    ("zero_shot", "lambada_acc"): ("lambada_openai", "acc", 1),
    ("retrieval", "drop_contains"): ("based_drop", "contains", 1),
    ("retrieval", "fda_contains"): ("based_fda", "contains", 1),
    ("retrieval", "nq_contains"): ("based_nq", "contains", 1),
    ("retrieval", "squad_contains"): ("based_squadv2", "contains", 1),
    ("retrieval", "swde_contains"): ("based_swde", "contains", 1),
    ("retrieval", "triviaqa_contains"): ("based_triviaqa", "contains", 1),
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


def check_protocol(evaluation: Evaluation) -> None:
    """An error that names every setting that is not the protocol's."""
    if evaluation.protocol != "paper":
        return
    deviations = []
    for name, suite in evaluation.suites.items():
        ours, papers = _stated(suite), _papers(name)
        deviations += [
            f"evaluation.suites.{name}.{path}: {ours.get(path)}, the paper's is {papers.get(path)}"
            for path in ours | papers
            if ours.get(path) != papers.get(path)
        ]
    if deviations:
        raise InputError(
            "the protocol `paper` is promised, but:\n  "
            + "\n  ".join(deviations)
            + "\nto evaluate like this, give evaluation.protocol another name: results carry it"
        )


def _stated(suite: Suite) -> dict[str, Any]:
    """Settings by their paths."""
    settings: dict[str, Any] = {"window": suite.window, "mean": suite.mean}
    for column, task in suite.tasks.items():
        for field in ("task", "metric", "version", "shots"):
            settings[f"tasks.{column}.{field}"] = getattr(task, field)
        # Data sets leave the hub. A file that replaces one is named next to its numbers.
        if task.file and not task.sha256:
            settings[f"tasks.{column}.file without `sha256`"] = task.file
    return settings


def _papers(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = dict(zip(("window", "mean"), SUITES.get(name, ()), strict=False))
    for (suite, column), numbers in COLUMNS.items():
        if suite == name:
            fields = zip(("task", "metric", "version", "shots"), (*numbers, 0), strict=True)
            settings |= {f"tasks.{column}.{field}": value for field, value in fields}
    return settings


def check_task_file(column: str, stated: Task, loaded: Mapping[str, Any]) -> None:
    """An error if lm-eval's task file is not what the configuration states."""
    version = loaded["metadata"]["version"]
    if (float(version), 0) != (stated.version, stated.shots):
        raise InputError(
            f"{column}: version {stated.version} of {stated.task} with {stated.shots} examples in "
            f"the prompt is stated, lm-eval would run version {version} with none"
        )
