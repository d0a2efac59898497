"""What is measured: tasks that models are evaluated on, and what is timed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from reproduction.config.section import (
    WHICH,
    Cut,
    Name,
    Pass,
    Section,
    Seed,
    Sha256,
    SliceName,
    Some,
)
from statecut.models.shapes import Kernel

_TEXT, _CHOICE = ("word_perplexity", "byte_perplexity", "bits_per_byte"), ("acc", "acc_norm")
_WORD, _ANSWER = ("perplexity", "acc"), ("contains",)
# The tasks that can be asked for, what each reports, its documents times their choices where it has
# some (near enough for a plan, not counted), and where its data is on the hub: repository,
# configuration (None: it has one only), split. lm-eval would need eleven seconds to say which it
# has; the based_ and demo_ ones are Statecut's own, and the latter made from a run's own text.
_TASKS: dict[str, tuple[tuple[str, ...], int, tuple[str, str | None, str] | None]] = {
    "wikitext": (_TEXT, 62, ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test")),
    "lambada_openai": (_WORD, 5153, ("EleutherAI/lambada_openai", "default", "test")),
    "arc_easy": (_CHOICE, 9501, ("allenai/ai2_arc", "ARC-Easy", "test")),
    "arc_challenge": (_CHOICE, 4687, ("allenai/ai2_arc", "ARC-Challenge", "test")),
    "hellaswag": (_CHOICE, 40168, ("Rowan/hellaswag", None, "validation")),
    "piqa": (_CHOICE, 3676, ("baber/piqa", None, "validation")),
    "winogrande": (("acc",), 2534, ("allenai/winogrande", "winogrande_xl", "validation")),
    "based_drop": (_ANSWER, 2090, ("hazyresearch/based_drop", None, "validation")),
    "based_fda": (_ANSWER, 1102, ("hazyresearch/based-fda", "default", "validation")),
    "based_nq": (_ANSWER, 3160, ("hazyresearch/based_nq_2048", None, "validation")),
    "based_squadv2": (_ANSWER, 2984, ("hazyresearch/based-squad", "default", "validation")),
    "based_swde": (_ANSWER, 1111, ("hazyresearch/based-swde-v2", "default", "validation")),
    "based_triviaqa": (_ANSWER, 1690, ("hazyresearch/based_triviaqa", None, "validation")),
    "demo_prose": (_TEXT, 200, None),
    "demo_last_word": (_WORD, 200, None),
    "demo_choice": (_CHOICE, 800, None),
    "demo_recall": (_ANSWER, 200, None),
}
TASKS = {name: metrics for name, (metrics, _, _) in _TASKS.items()}
REQUESTS = {name: requests for name, (_, requests, _) in _TASKS.items()}
DATA_SETS = {name: place for name, (_, _, place) in _TASKS.items() if place}

FRACTIONS = {"acc", "acc_norm", "contains"}
"""Metrics that tasks give from 0 to 1, and results in percent."""


class Task(Section):
    """One number of a suite."""

    label: str = Field(description="heading of its column")
    task: Literal[tuple(TASKS)] = Field(description="task")  # type: ignore[valid-type]
    metric: str = Field(description="metric of that task")
    version: int = Field(description="version of the task; another one is refused", ge=0)
    shots: int = Field(0, description="examples in the prompt", ge=0)
    revision: str = Field("main", description="of its data; `download` pins it, tables name others")
    file: str | None = Field(None, description="local file of the same form in place of its data")
    sha256: Sha256 | None = Field(None, description="of that file, which `paper` then allows")
    not_attempted: str | None = Field(None, description="why it has a dash instead")

    @model_validator(mode="after")
    def _metric_exists(self) -> Self:
        if self.metric not in TASKS[self.task]:
            known = ", ".join(TASKS[self.task])
            raise ValueError(f"metric {self.metric!r} of {self.task}, which reports {known}")
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
    batch: PositiveInt | None = Field(None, description="requests per batch; if absent, what fits")
    documents: PositiveInt | None = Field(None, description="of a task; if absent, all")
    tasks: dict[Name, Task] = Field(description="its numbers by name", min_length=1)
    mean: Name | None = Field(None, description="name of the mean over its tasks, if it has one")
    seeds: Some[Seed] | None = Field(None, description="which of the run's; if absent, all")

    @model_validator(mode="after")
    def _mean_is_of_fractions(self) -> Self:
        others = [name for name, task in self.tasks.items() if task.metric not in FRACTIONS]
        if self.mean and others:
            raise ValueError(f"mean {self.mean!r}: {others[0]} is no accuracy, only these have one")
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
        description="of `paper`, nothing may differ; others are marked in tables"
    )
    made_from: SliceName | None = Field(None, description="corpus/slice of the demo's own tasks")
    suites: dict[Name, Suite] = Field(description="suites by name")


class Mixer(Section):
    """A mixer layer to be timed."""

    label: str = Field(description="name in tables")
    architecture: Kernel = Field(description="which delta rule")
    use_gate: bool = Field(False, description="whether the output is gated")


class BenchmarkBase(Section):
    warmup: PositiveInt = Field(10, description="runs before the timing")
    repeats: PositiveInt = Field(50, description="timed runs")


class MixerBenchmark(BenchmarkBase):
    """Throughput and memory of one layer."""

    kind: Literal["mixer"] = WHICH
    mixers: dict[Name, Mixer] = Field(description="layers by name")
    # Kernels take no wider keys.
    widths: Some[Annotated[int, Field(ge=1, le=256)]] = Field(
        description="head widths d_k, the first one the reference"
    )
    passes: Some[Pass] = Field(description="forward, or forward and backward")
    batch: PositiveInt = Field(description="sequences")
    length: PositiveInt = Field(description="tokens in one sequence")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_heads: PositiveInt = Field(description="number of heads")
    head_v_dim: PositiveInt = Field(description="width of a head's values")


class CutBenchmark(BenchmarkBase):
    kind: str = WHICH
    models: Some[Name] = Field(description="models to be timed")
    ratios: Some[Cut] = Field(description="ratios, or KEYSxVALUES; the unpruned model is timed too")


class ModelBenchmark(CutBenchmark):
    """Throughput of whole models. Only their shapes count, so weights are random."""

    kind: Literal["model"] = WHICH
    passes: Some[Pass] = Field(description="forward, or a training step")
    batch: PositiveInt = Field(description="sequences")
    length: PositiveInt = Field(description="tokens in one sequence")
    graph: bool = Field(False, description="the forward pass as one CUDA graph too")

    def graphs(self, mode: str) -> bool:
        """Whether a pass is timed as a graph too."""
        return self.graph and mode == "forward"


class DecodingBenchmark(CutBenchmark):
    """Generation with the recurrent state: throughput, state bytes, largest batch."""

    kind: Literal["decoding"] = WHICH
    batches: Some[PositiveInt] = Field(description="sequences generated at once")
    prompt: PositiveInt = Field(description="tokens before the first generated one")
    tokens: PositiveInt = Field(description="generated tokens")

    def speeds(self) -> tuple[str, ...]:
        """The names of its speeds, batch by batch: as Python runs it, then as one CUDA graph."""
        ways = ("tokens_per_s", "graph_tokens_per_s")
        return tuple(f"{way}_{batch}" for way in ways for batch in self.batches)


Benchmark = Annotated[
    MixerBenchmark | ModelBenchmark | DecodingBenchmark, Field(discriminator="kind")
]


class Preflight(Section):
    """The check of every width on the GPU at hand before anything trains."""

    length: PositiveInt = Field(description="tokens of the test sequences")
    tolerance: PositiveFloat = Field(description="largest relative error against fp32")
