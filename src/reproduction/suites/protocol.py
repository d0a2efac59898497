"""Checks that an evaluation is what its configuration states.

The settings of the protocol `paper` are repeated here, so that no edit of a configuration can
change them unnoticed. Whatever the protocol, the version that a configuration states for a task
must be that of lm-eval's task file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduction.config import Evaluation, Task
from statecut.errors import InputError

# The window of each suite and the name of its mean; then the task, metric and version of each
# column, and how many examples its prompts have.
SUITES: dict[str, dict[str, Any]] = {
    "ppl": {
        "window": 10_000,
        "mean": None,
        "wikitext_word_ppl": ("wikitext", "word_perplexity", 2, 0),
        "lambada_ppl": ("lambada_openai", "perplexity", 1, 0),
    },
    "zero_shot": {
        "window": 10_000,
        "mean": "zero_shot_avg",
        "arc_easy_acc_norm": ("arc_easy", "acc_norm", 1, 0),
        "arc_challenge_acc_norm": ("arc_challenge", "acc_norm", 1, 0),
        "hellaswag_acc_norm": ("hellaswag", "acc_norm", 1, 0),
        "winogrande_acc": ("winogrande", "acc", 1, 0),
        "piqa_acc_norm": ("piqa", "acc_norm", 1, 0),
        "lambada_acc": ("lambada_openai", "acc", 1, 0),
    },
    "retrieval": {
        "window": 2_048,
        "mean": "retrieval_avg",
        "drop_contains": ("based_drop", "contains", 1, 0),
        "fda_contains": ("based_fda", "contains", 1, 0),
        "nq_contains": ("based_nq", "contains", 1, 0),
        "squad_contains": ("based_squadv2", "contains", 1, 0),
        "swde_contains": ("based_swde", "contains", 1, 0),
        "triviaqa_contains": ("based_triviaqa", "contains", 1, 0),
    },
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
        papers = SUITES.get(name, {})
        ours: dict[str, Any] = {"window": suite.window, "mean": suite.mean}
        if suite.documents:
            ours["documents"] = suite.documents
        for column, task in suite.tasks.items():
            ours[column] = (task.task, task.metric, task.version, task.shots)
            # Data sets leave the hub. A file that replaces one is named next to its numbers.
            if task.file and not task.sha256:
                ours[f"{column}.file without `sha256`"] = task.file
        deviations += [
            f"evaluation.suites.{name}, {key}: {ours.get(key)}, the paper's is {papers.get(key)}"
            for key in ours | papers
            if ours.get(key) != papers.get(key)
        ]
    if deviations:
        raise InputError(
            "the protocol `paper` is promised, but:\n  "
            + "\n  ".join(deviations)
            + "\nto evaluate like this, give evaluation.protocol another name: results carry it"
        )


def check_task_file(column: str, stated: Task, loaded: Mapping[str, Any]) -> None:
    """An error if lm-eval's task file is not what the configuration states."""
    version = loaded["metadata"]["version"]
    if (float(version), 0) != (stated.version, stated.shots):
        raise InputError(
            f"{column}: version {stated.version} of {stated.task} with {stated.shots} examples in "
            f"the prompt is stated, lm-eval would run version {version} with none"
        )
