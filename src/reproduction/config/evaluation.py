"""What models are evaluated on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from reproduction.config.section import Name, Section, Seed, Sha256, SliceName, Some
from statecut.errors import nearest

# The tasks that can be asked for, and what each reports. lm-eval would need eleven seconds to say
# which it has; the based_ and demo_ ones are Statecut's own.
TASKS: dict[str, tuple[str, ...]] = {
    "wikitext": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "lambada_openai": ("perplexity", "acc"),
    "arc_easy": ("acc", "acc_norm"),
    "arc_challenge": ("acc", "acc_norm"),
    "hellaswag": ("acc", "acc_norm"),
    "piqa": ("acc", "acc_norm"),
    "winogrande": ("acc",),
    "based_drop": ("contains",),
    "based_fda": ("contains",),
    "based_nq": ("contains",),
    "based_squadv2": ("contains",),
    "based_swde": ("contains",),
    "based_triviaqa": ("contains",),
    "demo_prose": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "demo_last_word": ("perplexity", "acc"),
    "demo_choice": ("acc", "acc_norm"),
    "demo_recall": ("contains",),
}

FRACTIONS = {"acc", "acc_norm", "contains"}
"""Metrics that tasks give from 0 to 1, and results in percent."""

# Where the data of a task is on the hub: repository, configuration (None: it has one only), split.
# The demo's tasks are made from its own text.
DATA_SETS: dict[str, tuple[str, str | None, str]] = {
    "wikitext": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"),
    "lambada_openai": ("EleutherAI/lambada_openai", "default", "test"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test"),
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "piqa": ("baber/piqa", None, "validation"),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation"),
    "based_drop": ("hazyresearch/based_drop", None, "validation"),
    "based_fda": ("hazyresearch/based-fda", "default", "validation"),
    "based_nq": ("hazyresearch/based_nq_2048", None, "validation"),
    "based_squadv2": ("hazyresearch/based-squad", "default", "validation"),
    "based_swde": ("hazyresearch/based-swde-v2", "default", "validation"),
    "based_triviaqa": ("hazyresearch/based_triviaqa", None, "validation"),
}


class Task(Section):
    """One number of a suite."""

    label: str = Field(description="heading of its column")
    task: Literal[tuple(TASKS)] = Field(description="task")  # type: ignore[valid-type]
    metric: str = Field(description="metric of that task")
    version: int = Field(description="version of the task; another one is refused", ge=0)
    shots: int = Field(0, description="examples in the prompt", ge=0)
    revision: str = Field(
        "main",
        description="revision of its data; `download` pins it once, and tables name any "
        "other than main",
    )
    file: str | None = Field(
        None,
        description="local file of the same form that stands in for its data, where the hub has "
        "it no more",
    )
    sha256: Sha256 | None = Field(
        None,
        description="what that file must be; with it the protocol `paper` takes the file too, and "
        "tables name it",
    )
    not_attempted: str | None = Field(
        None, description="why it is left out; its cells show a dash and this reason"
    )

    @model_validator(mode="after")
    def _metric_exists(self) -> Self:
        if self.metric not in TASKS[self.task]:
            raise ValueError(
                f"metric {self.metric!r} of {self.task}{nearest(self.metric, TASKS[self.task])}"
            )
        if self.task not in DATA_SETS and self.file is None:
            raise ValueError(f"{self.task} is on no hub: give the `file` that holds its data")
        if self.sha256 and self.file is None:
            raise ValueError("sha256 is that of a local `file`, and there is none")
        return self

    @property
    def note(self) -> str:
        """The note on numbers whose data is not the hub's main branch, or nothing."""
        if self.file is not None:
            # Without a hash it is another protocol, and the note is its name.
            return f"{self.task}: from {self.file}, {self.sha256[:12]}" if self.sha256 else ""
        return f"{self.task}: data at {self.revision}" if self.revision != "main" else ""


class Suite(Section):
    """Tasks that are evaluated together, in one process per model."""

    label: str = Field(description="heading of its mean")
    window: PositiveInt = Field(description="longest input in tokens")
    batch: PositiveInt | None = Field(
        None, description="requests per batch; as many as fit if not given"
    )
    tasks: dict[Name, Task] = Field(
        description="its numbers, by their name in the results", min_length=1
    )
    mean: Name | None = Field(None, description="name of the mean over its tasks, if it has one")
    seeds: Some[Seed] | None = Field(
        None, description="which of the run's seeds it is evaluated with; all of them if not given"
    )

    @model_validator(mode="after")
    def _mean_is_of_fractions(self) -> Self:
        others = [name for name, task in self.tasks.items() if task.metric not in FRACTIONS]
        if self.mean and others:
            raise ValueError(
                f"mean {self.mean!r}: only accuracies have one, and {others[0]} is of metric "
                f"{self.tasks[others[0]].metric}: leave `mean` out, or take another suite for it"
            )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.tasks, self.mean) if self.mean else tuple(self.tasks)

    def left_out(self, column: str) -> str | None:
        """Why a column is not attempted; a mean is not where one of its tasks is not."""
        tasks = self.tasks.values() if column == self.mean else [self.tasks[column]]
        return next((task.not_attempted for task in tasks if task.not_attempted), None)


class Evaluation(Section):
    """How models are evaluated."""

    protocol: Name = Field(
        description="`paper` promises the settings of config/paper.yaml, and what differs from "
        "them is refused; under any other name, results are marked with it"
    )
    made_from: SliceName | None = Field(
        None, description="what the demo's own tasks are made of, as corpus/slice"
    )
    suites: dict[Name, Suite] = Field(description="suites by name")
