"""The configuration of a run: what is trained, pruned, measured and printed.

One YAML file describes one run. Everything in it has a name, things refer to each other by name,
and what a table needs (`Config.variants`, `Config.evaluations`, `Config.measurements`) follows
from the file alone, so that the workflow and the plan ask the same functions. How and where a run
is computed (GPUs, memory, time) is no part of it.

`python -m keycut.config` writes config/schema.json and config/README.md from these models.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    Strict,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from keycut.errors import InputError, nearest

T = TypeVar("T")

Architecture = Literal["delta_net", "delta_net_shared", "gated_deltanet"]
Kernel = Literal["delta_net", "gated_deltanet"]
Target = Literal["kq", "k", "q"]
Stage = Literal["none", "pre", "post"]
Pass = Literal["forward", "training"]

BASELINE = "baseline"
"""The method of a variant that nothing was cut from, as in the published numbers."""

# The tasks that can be asked for, and what each reports. lm-eval would need eleven seconds to say
# which it has; the based_ and demo_ ones are Keycut's own.
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


def width(d_k: int, ratio: float | str | Decimal | Fraction) -> int:
    """Channels left of `d_k` after cutting `ratio`: floor(d_k (1 - ratio)), in exact arithmetic.

    The ratio is what its decimal text says: in floating point 10 * (1 - 0.9) is below 1.
    """
    exact = Fraction(str(ratio))
    if not 0 <= exact < 1:
        raise InputError(f"ratio {ratio}: must lie in (0, 1), or be 0 for a model left whole")
    left = int(d_k * (1 - exact))
    if left < 1:
        raise InputError(f"ratio {ratio} leaves no channel of {d_k}; choose a smaller one")
    return left


def _in_unit_interval(ratio: float) -> float:
    if not 0 < ratio < 1:
        raise ValueError("a ratio must lie in (0, 1)")
    return ratio


def _no_repeats(values: tuple[T, ...]) -> tuple[T, ...]:
    repeated = [value for i, value in enumerate(values) if value in values[:i]]
    if repeated:
        raise ValueError(f"{repeated[0]} stands twice")
    return values


# Names become parts of paths and wildcards of the workflow.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
HubName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]
SliceName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]
TextFile = Annotated[str, StringConstraints(pattern=r"\.(jsonl|txt)(\.(xz|gz|zst))?$")]
Ratio = Annotated[
    float,
    AfterValidator(_in_unit_interval),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
]
Seed = Annotated[int, Field(ge=0)]
Fractional = Annotated[float, Field(ge=0, le=1)]
# YAML gives lists; a frozen model keeps tuples.
Many = Annotated[tuple[T, ...], Strict(False), AfterValidator(_no_repeats)]
Some = Annotated[tuple[T, ...], Strict(False), AfterValidator(_no_repeats), Field(min_length=1)]


WHICH: Any = Field(description="says which of its kind this is")


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, and nothing changes once it is read."""

    # Deferred: importing this file must stay cheap, and a run builds only the whole.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )


# --- text ---------------------------------------------------------------------------------------


class FromHub(Section):
    """A model or tokenizer from the hub. A model's own config must agree with the sizes given."""

    kind: Literal["hub"] = WHICH
    name: HubName = Field(description="repository on the hub")
    revision: str = Field("main", description="branch or commit; `download` pins it once")


class FromDisk(Section):
    """A model or tokenizer from this machine."""

    kind: Literal["local"] = WHICH
    path: str = Field(
        description="relative to the checkout: a model's folder (safetensors), a tokenizer's "
        "folder, or a sentencepiece .model file"
    )


class TrainedTokenizer(Section):
    """A byte-pair tokenizer trained on the spot."""

    kind: Literal["train"] = WHICH
    corpus: Name = Field(description="corpus whose text it is trained on")
    vocab_size: PositiveInt = Field(description="number of tokens")


Tokenizer = Annotated[FromHub | FromDisk | TrainedTokenizer, Field(discriminator="kind")]


class CorpusBase(Section):
    length: PositiveInt = Field(description="tokens in one sequence")
    seed: Seed = Field(description="seed of the order of the documents")
    slices: dict[Name, PositiveInt] = Field(
        description="sequences per use, taken from the packed text one after another, so that no "
        "two uses share a sequence"
    )


class HubCorpus(CorpusBase):
    """Text from a data set on the hub."""

    kind: Literal["hub"] = WHICH
    name: HubName = Field(description="data set on the hub")
    config: str | None = Field(None, description="its configuration, where it has several")
    split: str = Field("train", description="its split")
    text_field: str = Field("text", description="field of a record that holds the text")
    revision: str = Field("main", description="branch or commit; `download` pins it once")


class LocalCorpus(CorpusBase):
    """Text from files."""

    kind: Literal["local"] = WHICH
    files: Some[TextFile] = Field(
        description="files or patterns, relative to the checkout: .jsonl or .txt, plain or "
        "packed as .xz, .gz or .zst"
    )
    text_field: str = Field("text", description="field of a jsonl record that holds the text")


class DocumentationCorpus(CorpusBase):
    """Prose found in the installed Python packages: no download."""

    kind: Literal["documentation"] = WHICH


Corpus = Annotated[HubCorpus | LocalCorpus | DocumentationCorpus, Field(discriminator="kind")]


# --- training -----------------------------------------------------------------------------------


class Training(Section):
    """What pretraining and recovery have in common: AdamW, linear warm-up, cosine to a floor."""

    data: SliceName = Field(description="what is trained on, as corpus/slice")
    epochs: PositiveInt = Field(1, description="most passes over that slice")
    steps: PositiveInt = Field(description="optimizer steps")
    batch: PositiveInt = Field(description="sequences per step and GPU")
    learning_rate: PositiveFloat = Field(description="peak learning rate")
    warmup: int = Field(description="steps of linear warm-up", ge=0)
    floor: Fractional = Field(description="final learning rate, as a fraction of the peak")
    betas: Annotated[tuple[Fractional, Fractional], Strict(False)] = Field(
        (0.9, 0.95), description="AdamW's two decay rates"
    )
    eps: PositiveFloat = Field(description="AdamW's epsilon")
    weight_decay: float = Field(0.1, description="AdamW's weight decay", ge=0)
    clip: PositiveFloat = Field(description="largest norm of the gradient")
    seed: Seed = Field(description="seed of initial weights and data order")

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup >= self.steps:
            raise ValueError(f"warmup {self.warmup} must be less than steps {self.steps}")
        return self

    @property
    def sequences(self) -> int:
        """Sequences seen in the whole training."""
        return self.steps * self.batch


class Recipe(Training):
    """How a model is pretrained."""

    trainer: Literal["flame", "builtin"] = Field(
        description="flame, as the paper used, or the trainer that comes with Keycut"
    )
    world_size: PositiveInt = Field(
        1, description="number of GPUs; it stands here because batch x world_size is the real batch"
    )

    @property
    def sequences(self) -> int:
        return super().sequences * self.world_size


class Lora(Section):
    """The low-rank adapters of recovery."""

    rank: PositiveInt = Field(description="rank r")
    alpha: PositiveFloat = Field(description="scale alpha; updates are multiplied by alpha / r")
    modules: Some[str] = Field(
        ("q_proj", "k_proj", "v_proj"), description="projections that get an adapter"
    )


class Distillation(Section):
    """Learning from the unpruned model during recovery."""

    temperature: PositiveFloat = Field(description="temperature of both distributions")
    weight: PositiveFloat = Field(description="weight of the divergence beside the cross-entropy")


class Recovery(Training):
    """Recovery fine-tuning (RFT) of pruned models: adapters and convolutions learn, the rest is
    frozen."""

    lora: Lora = Field(description="the adapters")
    distillation: Distillation = Field(description="the teacher's part")
    control: bool = Field(
        True, description="recover the unpruned model too, wherever a table shows recovered ones"
    )
    seeds: Some[Seed] | None = Field(
        None, description="which of the run's seeds are recovered; all of them if not given"
    )


# --- models -------------------------------------------------------------------------------------


class Pretrained(Section):
    """A model trained by this run."""

    kind: Literal["pretrain"] = WHICH
    recipe: Name = Field(description="one of `recipes`")


class ModelBase(Section):
    label: str = Field(description="name in tables and figures")
    source: Annotated[Pretrained | FromHub | FromDisk, Field(discriminator="kind")] = Field(
        description="where its weights come from"
    )
    tokenizer: Name = Field(description="one of `tokenizers`")
    vocab_size: PositiveInt = Field(32000, description="rows of the embedding")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_hidden_layers: PositiveInt = Field(description="number of layers")
    num_heads: PositiveInt = Field(description="heads of keys and queries")
    conv_size: PositiveInt = Field(4, description="taps of the short convolutions")
    intermediate_size: PositiveInt | None = Field(
        None, description="width of the MLP; 8/3 of hidden_size, up to a multiple of 256, if absent"
    )
    tie_word_embeddings: bool = Field(
        False, description="whether input and output embeddings are one matrix"
    )
    published_as: Name | None = Field(
        None, description="its name in config/published/values.csv, where that is another"
    )

    @property
    def mlp_width(self) -> int:
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-int(self.hidden_size * 4 * 2 / 3) // 256) * 256

    def _fla(self, **sizes: Any) -> dict[str, Any]:
        common = (
            "hidden_size",
            "num_hidden_layers",
            "num_heads",
            "conv_size",
            "vocab_size",
            "tie_word_embeddings",
        )
        return (
            {name: getattr(self, name) for name in common}
            | {"intermediate_size": self.mlp_width}
            | sizes
        )

    def _parameters(self, key_dim: int, value_dim: int, filters: int, rest: int) -> int:
        """All parameters, given the sums over heads and what one mixer has beside projections."""
        mixer = 2 * self.hidden_size * (key_dim + value_dim) + self.conv_size * filters + rest
        layer = mixer + 3 * self.hidden_size * self.mlp_width + 2 * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


class DeltaNetBase(ModelBase):
    kernel: ClassVar[Kernel] = "delta_net"
    expand_k: PositiveFloat = Field(
        1.0, description="keys of all heads together, as a multiple of hidden_size"
    )
    expand_v: PositiveFloat = Field(
        1.0, description="values of all heads together, as a multiple of hidden_size"
    )

    @model_validator(mode="after")
    def _heads_are_whole(self) -> Self:
        for name, factor in (("expand_k", self.expand_k), ("expand_v", self.expand_v)):
            share = Fraction(str(factor)) * self.hidden_size / self.num_heads
            if share.denominator != 1:
                raise ValueError(
                    f"hidden_size {self.hidden_size} x {name} {factor} / num_heads "
                    f"{self.num_heads} = {float(share):g}: the width of a head must be whole"
                )
        return self

    @property
    def head_k_dim(self) -> int:
        return int(Fraction(str(self.expand_k)) * self.hidden_size / self.num_heads)

    @property
    def head_v_dim(self) -> int:
        return int(Fraction(str(self.expand_v)) * self.hidden_size / self.num_heads)

    def _with_filters(self, filters: int | None = None) -> int:
        keys, values = self.num_heads * self.head_k_dim, self.num_heads * self.head_v_dim
        beta, norm = self.hidden_size * self.num_heads, self.head_v_dim
        return self._parameters(keys, values, filters or 2 * keys + values, beta + norm)


class DeltaNet(DeltaNetBase):
    """DeltaNet, as in flash-linear-attention: head widths follow from hidden_size."""

    architecture: Literal["delta_net"] = WHICH
    conv_sharing: ClassVar[str] = "none"

    @property
    def parameters(self) -> int:
        return self._with_filters()

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        return self._fla(model_type="delta_net", expand_k=self.expand_k, expand_v=self.expand_v)


class SharedDeltaNet(DeltaNetBase):
    """DeltaNet whose channels share convolution filters, in q, k and v each."""

    architecture: Literal["delta_net_shared"] = WHICH
    conv_sharing: Literal["head", "all"] = Field(
        description="one filter per head, or one for all heads and channels"
    )

    @property
    def parameters(self) -> int:
        return self._with_filters(3 * (self.num_heads if self.conv_sharing == "head" else 1))

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        return self._fla(
            model_type="delta_net_shared_conv",
            expand_k=self.expand_k,
            expand_v=self.expand_v,
            conv_sharing=self.conv_sharing,
        )


class GatedDeltaNet(ModelBase):
    """Gated DeltaNet, as in flash-linear-attention: head widths are free."""

    architecture: Literal["gated_deltanet"] = WHICH
    kernel: ClassVar[Kernel] = "gated_deltanet"
    conv_sharing: ClassVar[str] = "none"
    head_dim: PositiveInt = Field(description="width of a head's keys and queries")
    expand_v: PositiveFloat = Field(description="width of a head's values, as a multiple of that")
    num_v_heads: PositiveInt | None = Field(
        None, description="heads of values, a multiple of num_heads; as many if absent"
    )
    use_gate: bool = Field(True, description="whether the output is gated")

    @model_validator(mode="after")
    def _heads_are_whole(self) -> Self:
        share = Fraction(str(self.expand_v)) * self.head_dim
        if share.denominator != 1:
            raise ValueError(
                f"head_dim {self.head_dim} x expand_v {self.expand_v} = {float(share):g}: "
                "the width of a value head must be whole"
            )
        if self.value_heads % self.num_heads:
            raise ValueError(
                f"num_v_heads {self.num_v_heads} must be a multiple of num_heads {self.num_heads}"
            )
        return self

    @property
    def value_heads(self) -> int:
        return self.num_v_heads or self.num_heads

    @property
    def head_k_dim(self) -> int:
        return self.head_dim

    @property
    def head_v_dim(self) -> int:
        return int(Fraction(str(self.expand_v)) * self.head_dim)

    @property
    def parameters(self) -> int:
        keys, values = self.num_heads * self.head_k_dim, self.value_heads * self.head_v_dim
        gate = self.hidden_size * values if self.use_gate else 0
        # a and beta from the input; A_log and dt_bias of their own.
        decay = (2 * self.hidden_size + 2) * self.value_heads
        rest = gate + decay + self.head_v_dim
        return self._parameters(keys, values, 2 * keys + values, rest)

    def fla_config(self) -> dict[str, Any]:
        """Arguments of the model's config class, with its model_type."""
        return self._fla(
            model_type="gated_deltanet",
            head_dim=self.head_dim,
            expand_v=self.expand_v,
            num_v_heads=self.num_v_heads,
            use_gate=self.use_gate,
        )


Model = Annotated[DeltaNet | SharedDeltaNet | GatedDeltaNet, Field(discriminator="architecture")]


# --- pruning ------------------------------------------------------------------------------------


class Calibration(Section):
    """The text that scores are computed on, once per model and seed."""

    data: SliceName = Field(description="where its sequences are drawn from, as corpus/slice")
    sequences: PositiveInt = Field(description="number of sequences")
    rows: PositiveInt = Field(
        description="rows of keys, and as many of queries, in the sample that methods with "
        "`rows: sample` see"
    )


class MethodBase(Section):
    label: str = Field(description="name in tables and figures")
    target: Target = Field(
        "kq", description="what is scored, unless a table asks for others: keys, queries or both"
    )

    @property
    def calibrated(self) -> bool:
        return True

    @property
    def drawn(self) -> bool:
        """Whether another seed may give another selection."""
        return self.calibrated


class Weighted(MethodBase):
    """Methods of the weights alone: their magnitude, or chance."""

    algorithm: Literal["l1", "rand"] = WHICH

    @property
    def calibrated(self) -> bool:
        return False

    @property
    def drawn(self) -> bool:
        return self.algorithm == "rand"


class Calibrated(MethodBase):
    """Methods of weights and calibration, without options."""

    algorithm: Literal["s_wanda", "grad", "pca_proper", "pca_adversarial"] = WHICH


class FactoredBase(MethodBase):
    rows: Literal["sample", "all"] = Field(
        "sample", description="the sample of the calibration, or every token of it"
    )
    activations: Literal["raw", "normalised"] = Field(
        "raw", description="keys and queries before or after their L2 norm"
    )


class Pivoted(FactoredBase):
    """Column-pivoted QR of the activations: where DRRQR starts, without its swaps."""

    algorithm: Literal["qrcp"] = WHICH


class Swapped(FactoredBase):
    """Strong rank-revealing QR of the activations."""

    algorithm: Literal["drrqr"] = WHICH
    f: float = Field(
        1.5, description="swaps end when none enlarges the volume more than this", ge=1
    )


Method = Annotated[Weighted | Calibrated | Pivoted | Swapped, Field(discriminator="algorithm")]


# --- evaluation ---------------------------------------------------------------------------------


class Task(Section):
    """One number of a suite."""

    label: str = Field(description="heading of its column")
    task: Literal[tuple(TASKS)] = Field(description="task")  # type: ignore[valid-type]
    metric: str = Field(description="metric of that task")
    version: int = Field(description="version of the task; another one is refused", ge=0)
    shots: int = Field(0, description="examples in the prompt", ge=0)
    revision: str = Field("main", description="revision of its data; `download` pins it once")
    file: str | None = Field(
        None, description="local file of the same form that stands in for its data"
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
        return self


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
    suites: dict[Name, Suite] = Field(description="suites by name")


# --- benchmarks ---------------------------------------------------------------------------------


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
    widths: Some[PositiveInt] = Field(description="head widths d_k, the first one the reference")
    passes: Some[Pass] = Field(description="forward, or forward and backward")
    batch: PositiveInt = Field(description="sequences")
    length: PositiveInt = Field(description="tokens in one sequence")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_heads: PositiveInt = Field(description="number of heads")
    head_v_dim: PositiveInt = Field(description="width of a head's values")


class ModelBenchmark(BenchmarkBase):
    """Throughput of whole models. Only their shapes count, so weights are random."""

    kind: Literal["model"] = WHICH
    models: Some[Name] = Field(description="models to be timed")
    ratios: Some[Ratio] = Field(description="ratios beside the model left whole")
    passes: Some[Pass] = Field(description="forward, or a training step")
    batch: PositiveInt = Field(description="sequences")
    length: PositiveInt = Field(description="tokens in one sequence")


class DecodingBenchmark(BenchmarkBase):
    """Generation with the recurrent state: throughput, state bytes, largest batch."""

    kind: Literal["decoding"] = WHICH
    models: Some[Name] = Field(description="models to be timed")
    ratios: Some[Ratio] = Field(description="ratios beside the model left whole")
    batches: Some[PositiveInt] = Field(description="sequences generated at once")
    prompt: PositiveInt = Field(description="tokens before the first generated one")
    tokens: PositiveInt = Field(description="generated tokens")


Benchmark = Annotated[
    MixerBenchmark | ModelBenchmark | DecodingBenchmark, Field(discriminator="kind")
]


class Preflight(Section):
    """The check of every width on the GPU at hand before anything trains."""

    length: PositiveInt = Field(description="tokens of the test sequences")
    tolerance: PositiveFloat = Field(
        description="largest relative error of outputs and gradients against fp32"
    )


# --- what is shown ------------------------------------------------------------------------------


class Analysis(Section):
    """The sequence whose states are analysed, one pass per variant."""

    data: SliceName = Field(description="its first sequence is taken, as corpus/slice")
    skip: int = Field(128, description="first tokens left out of the spectra", ge=0)


class FigureBase(Section):
    caption: str = Field(description="its caption")


class RankFigure(FigureBase):
    model: Name = Field(description="one of `models`")
    methods: Some[Name] = Field(description="methods beside the baseline")
    ratio: Ratio = Field(description="fraction of channels cut")
    stages: Some[Literal["pre", "post"]] = Field(
        ("pre",), description="before or after recovery, or both"
    )
    tokens: PositiveInt = Field(description="tokens of the sequence that are shown")


class SpectrumFigure(RankFigure):
    """Singular values of one head's states, in a model and in its pruned variants."""

    kind: Literal["spectrum"] = WHICH
    layer: int = Field(description="layer of the head, from 0 on", ge=0)
    head: int = Field(description="the head, from 0 on", ge=0)


class UtilizationFigure(RankFigure):
    """Rank utilization over tokens, in a model and in its pruned variants."""

    kind: Literal["utilization"] = WHICH


class FilterFigure(FigureBase):
    """Convolution filters of a model."""

    kind: Literal["filters"] = WHICH
    model: Name = Field(description="one of `models`")


class SweepFigure(FigureBase):
    """Throughput against head width."""

    kind: Literal["sweep"] = WHICH
    benchmark: Name = Field(description="a mixer benchmark")


Figure = Annotated[
    SpectrumFigure | UtilizationFigure | FilterFigure | SweepFigure, Field(discriminator="kind")
]


class TableBase(Section):
    caption: str = Field(description="its caption")


class QualityTable(TableBase):
    """A table of evaluated variants. Rows and columns decide what is computed for it."""

    kind: Literal[
        "by_ratio", "by_model", "sharing", "rotation", "targets", "summary", "breakdown"
    ] = WHICH
    models: Some[Name] = Field(description="models, always with their unpruned baseline")
    methods: Many[Name] = Field((), description="methods")
    ratios: Many[Ratio] = Field((), description="fractions of channels cut")
    targets: Some[Target] | None = Field(
        None, description="targets of every method; each method's own if not given"
    )
    columns: dict[Stage, Some[Name]] = Field(
        description="names of suites (all their columns) or of columns, before (pre) and after "
        "(post) recovery; under none for a table of baselines alone",
        min_length=1,
    )

    @model_validator(mode="after")
    def _rows_fit_stages(self) -> Self:
        if bool(self.methods) != bool(self.ratios):
            raise ValueError("methods and ratios need each other")
        stages = {"pre", "post"} if self.methods else {"none"}
        if not self.columns.keys() <= stages:
            raise ValueError(
                "columns stand under pre and post in a table with methods, under none in others"
            )
        return self


class SpeedTable(TableBase):
    """A table of a benchmark of mixers or models."""

    kind: Literal["mixer_speed", "model_speed"] = WHICH
    benchmark: Name = Field(description="benchmark of the matching kind")
    shows: Pass = Field(description="which of its passes is printed")


class DecodingTable(TableBase):
    """A table of generation."""

    kind: Literal["decoding_speed"] = WHICH
    benchmark: Name = Field(description="benchmark of kind decoding")


Table = Annotated[QualityTable | SpeedTable | DecodingTable, Field(discriminator="kind")]


# --- the whole ----------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Variant:
    """One model to be evaluated: a model, what was cut from it, and whether it was recovered.

    The baseline has method `baseline`, target "", ratio 0 and stage none, or post for the
    recovered control. `seed` is 0 where nothing is drawn.
    """

    model: str
    method: str
    target: str
    ratio: float
    seed: int
    rft: Stage

    @property
    def pruned(self) -> bool:
        return self.method != BASELINE


@dataclass(frozen=True, order=True)
class Measurement:
    """One cell of a benchmark, measured in a process of its own."""

    benchmark: str
    subject: str  # a mixer or a model
    kernel: Kernel
    ratio: float  # 0 for mixers: their widths are given
    width: int  # d_k
    does: str  # forward, training or decoding

    @property
    def trains(self) -> bool:
        return self.does == "training"


class Config(Section):
    """One run."""

    run: Name = Field(description="name of the run; its results are under results/RUN/")
    seeds: Some[Seed] = Field(
        description="seeds of whatever is drawn: random channels, calibration text, sampled rows"
    )
    tokenizers: dict[Name, Tokenizer] = Field(description="tokenizers by name")
    corpora: dict[Name, Corpus] = Field(description="text by name")
    recipes: dict[Name, Recipe] = Field({}, description="pretraining recipes by name")
    models: dict[Name, Model] = Field(description="models by name", min_length=1)
    calibration: Calibration | None = Field(
        None, description="needed by every method but l1 and rand"
    )
    methods: dict[Name, Method] = Field({}, description="pruning methods by name")
    recovery: Recovery | None = Field(
        None, description="needed by tables and figures that show recovered models"
    )
    evaluation: Evaluation = Field(description="how models are evaluated")
    benchmarks: dict[Name, Benchmark] = Field({}, description="benchmarks by name")
    preflight: Preflight = Field(description="the check of kernels and widths")
    analysis: Analysis | None = Field(None, description="needed by figures of states")
    figures: dict[Name, Figure] = Field({}, description="figures by name")
    tables: dict[Name, Table] = Field({}, description="tables by name")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(_dangling(self)) or list(_inconsistent(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def slice(self, name: str) -> range:
        """The sequences of a `corpus/slice`, as positions in the packed corpus."""
        corpus, wanted = name.split("/")
        start = 0
        for slice_name, sequences in self.corpora[corpus].slices.items():
            if slice_name == wanted:
                return range(start, start + sequences)
            start += sequences
        raise InputError(f"{name}{nearest(wanted, self.corpora[corpus].slices)}")

    def suite_of(self, column: str) -> str:
        """The suite that a column of the results belongs to."""
        suites = self.evaluation.suites
        for name, suite in suites.items():
            if column in suite.columns:
                return name
        known = [known for suite in suites.values() for known in suite.columns]
        raise InputError(f"column {column!r}{nearest(column, known)}")

    def columns(self, table: str, stage: Stage) -> tuple[str, ...]:
        """The columns that a table shows of a stage; of a baseline (none), those of all stages."""
        spec = self._table(table)
        stages = spec.columns if stage == "none" else [stage]
        suites = self.evaluation.suites
        names = [
            column
            for key in stages
            for name in spec.columns.get(key, ())
            for column in (suites[name].columns if name in suites else (name,))
        ]
        return _unique(names)

    def cells(self, table: str) -> tuple[tuple[Variant, str], ...]:
        """Every cell of a table of variants: which variant, and which column of its results."""
        spec = self._table(table)
        return tuple(
            (variant, column)
            for variant in self._variants(
                spec.models, spec.methods, spec.ratios, spec.targets, tuple(spec.columns)
            )
            for column in self.columns(table, variant.rft)
        )

    def evaluations(self, *tables: str) -> tuple[tuple[Variant, str], ...]:
        """Which variant is evaluated on which suite, for these tables or for all."""
        suites = self.evaluation.suites
        return _unique(
            (variant, suite)
            for table in tables or self.tables
            if isinstance(self._named("tables", table), QualityTable)
            for variant, column in self.cells(table)
            if not suites[suite := self.suite_of(column)].left_out(column)
        )

    def analyses(self, *figures: str) -> tuple[Variant, ...]:
        """Variants whose states are analysed, for these figures or for all."""
        return _unique(
            variant
            for name in figures or self.figures
            if isinstance(figure := self._named("figures", name), RankFigure)
            for variant in self._variants(
                (figure.model,), figure.methods, (figure.ratio,), None, figure.stages
            )
            if variant.pruned or variant.rft == "none"
        )

    def variants(self, *names: str) -> tuple[Variant, ...]:
        """Every variant that these tables and figures need, or that the whole run needs."""
        for name in names:
            if name not in self.tables and name not in self.figures:
                shown = [*self.tables, *self.figures]
                raise InputError(f"{name!r} is no table or figure{nearest(name, shown)}")
        tables = [name for name in names if name in self.tables]
        figures = [name for name in names if name in self.figures]
        from_tables = self.evaluations(*tables) if tables or not names else ()
        from_figures = self.analyses(*figures) if figures or not names else ()
        return _unique([*(variant for variant, _ in from_tables), *from_figures])

    def measurements(self, *benchmarks: str) -> tuple[Measurement, ...]:
        """Every cell of these benchmarks, or of all."""
        return tuple(
            cell
            for name in benchmarks or self.benchmarks
            for cell in self._measurements(name, self._named("benchmarks", name))
        )

    def trained_widths(self) -> tuple[tuple[Kernel, int], ...]:
        """Delta rules and head widths that will be trained, for the preflight."""
        widths: list[tuple[Kernel, int]] = [
            (model.kernel, model.head_k_dim)
            for model in self.models.values()
            if model.source.kind == "pretrain"
        ]
        for variant in self.variants():
            if variant.rft == "post":
                model = self.models[variant.model]
                widths.append((model.kernel, width(model.head_k_dim, variant.ratio)))
        widths += [(cell.kernel, cell.width) for cell in self.measurements() if cell.trains]
        return tuple(sorted(set(widths)))

    def _named(self, section: str, name: str) -> Any:
        things = getattr(self, section)
        if name not in things:
            raise InputError(
                f"{name!r} is none of the {section} of {self.run}{nearest(name, things)}"
            )
        return things[name]

    def _table(self, name: str) -> QualityTable:
        table = self._named("tables", name)
        if not isinstance(table, QualityTable):
            raise InputError(f"table {name!r} shows a benchmark, not variants")
        return table

    def _variants(
        self,
        models: Iterable[str],
        methods: Iterable[str],
        ratios: Iterable[float],
        targets: Iterable[Target] | None,
        stages: tuple[Stage, ...],
    ) -> Iterator[Variant]:
        recovered = self.recovery.seeds or self.seeds if self.recovery else ()
        for model in models:
            baseline = Variant(model, BASELINE, "", 0.0, 0, "none")
            yield baseline
            if "post" in stages and self.recovery and self.recovery.control:
                yield replace(baseline, rft="post")
            for name in methods:
                method = self.methods[name]
                for stage in stages:
                    seeds = self.seeds if stage == "pre" else recovered
                    for target in targets or (method.target,):
                        for ratio in ratios:
                            for seed in seeds if method.drawn else (0,):
                                yield Variant(model, name, target, ratio, seed, stage)

    def _measurements(self, name: str, benchmark: Any) -> Iterator[Measurement]:
        if isinstance(benchmark, MixerBenchmark):
            for subject, mixer in benchmark.mixers.items():
                for d_k in benchmark.widths:
                    for does in benchmark.passes:
                        yield Measurement(name, subject, mixer.architecture, 0.0, d_k, does)
            return
        passes: tuple[str, ...] = ("decoding",)
        if isinstance(benchmark, ModelBenchmark):
            passes = benchmark.passes
        for subject in benchmark.models:
            model = self.models[subject]
            for ratio in (0.0, *benchmark.ratios):
                d_k = width(model.head_k_dim, ratio)
                for action in passes:
                    yield Measurement(name, subject, model.kernel, ratio, d_k, action)


def _unique(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def _reference(path: str, name: str, section: str, known: Iterable[str]) -> Iterator[str]:
    if name not in known:
        yield f"{path}: {name!r} is none of `{section}`{nearest(name, known)}"


def _slice_reference(config: Config, path: str, name: str) -> Iterator[str]:
    slices = {f"{c}/{s}" for c, corpus in config.corpora.items() for s in corpus.slices}
    yield from _reference(path, name, "corpora", slices)


def _dangling(config: Config) -> Iterator[str]:
    """Names that refer to nothing."""
    suites = config.evaluation.suites
    shown = {*suites, *(column for suite in suites.values() for column in suite.columns)}

    for name, tokenizer in config.tokenizers.items():
        if tokenizer.kind == "train":
            path = f"tokenizers.{name}.corpus"
            yield from _reference(path, tokenizer.corpus, "corpora", config.corpora)
    for name, recipe in config.recipes.items():
        yield from _slice_reference(config, f"recipes.{name}.data", recipe.data)
    for section in ("calibration", "recovery", "analysis"):
        if part := getattr(config, section):
            yield from _slice_reference(config, f"{section}.data", part.data)
    for name, model in config.models.items():
        path = f"models.{name}"
        yield from _reference(f"{path}.tokenizer", model.tokenizer, "tokenizers", config.tokenizers)
        if model.source.kind == "pretrain":
            recipe_path = f"{path}.source.recipe"
            yield from _reference(recipe_path, model.source.recipe, "recipes", config.recipes)
    for name, benchmark in config.benchmarks.items():
        for model_name in () if benchmark.kind == "mixer" else benchmark.models:
            yield from _reference(f"benchmarks.{name}.models", model_name, "models", config.models)
    for name, figure in config.figures.items():
        path = f"figures.{name}"
        if figure.kind == "sweep":
            benchmarks = [n for n, b in config.benchmarks.items() if b.kind == "mixer"]
            yield from _reference(
                f"{path}.benchmark", figure.benchmark, "benchmarks of kind mixer", benchmarks
            )
            continue
        yield from _reference(f"{path}.model", figure.model, "models", config.models)
        for method in () if figure.kind == "filters" else figure.methods:
            yield from _reference(f"{path}.methods", method, "methods", config.methods)
    for name, table in config.tables.items():
        path = f"tables.{name}"
        if not isinstance(table, QualityTable):
            kind = table.kind.removesuffix("_speed")
            benchmarks = [n for n, b in config.benchmarks.items() if b.kind == kind]
            yield from _reference(
                f"{path}.benchmark", table.benchmark, f"benchmarks of kind {kind}", benchmarks
            )
            continue
        for model_name in table.models:
            yield from _reference(f"{path}.models", model_name, "models", config.models)
        for method in table.methods:
            yield from _reference(f"{path}.methods", method, "methods", config.methods)
        for stage, columns in table.columns.items():
            for column in columns:
                yield from _reference(
                    f"{path}.columns.{stage}", column, "evaluation.suites and columns", shown
                )


def _inconsistent(config: Config) -> Iterator[str]:
    """What cannot go together, in a configuration whose names all refer to something."""
    yield from _bad_data(config)
    yield from _bad_columns(config)
    yield from _bad_needs(config)
    yield from _bad_sizes(config)


def _bad_data(config: Config) -> Iterator[str]:
    """More text asked for than there is, and tokens that do not fit."""
    trainings: dict[str, Training] = {f"recipes.{n}": r for n, r in config.recipes.items()}
    if config.recovery:
        trainings["recovery"] = config.recovery
    for path, training in trainings.items():
        there = len(config.slice(training.data)) * training.epochs
        if training.sequences > there:
            yield (
                f"{path}: {training.steps} steps need {training.sequences} sequences, but "
                f"{training.data} has {there} in {training.epochs} epochs"
            )
    if config.recovery:
        for seed in sorted(set(config.recovery.seeds or ()) - set(config.seeds)):
            yield f"recovery.seeds: {seed} is none of `seeds` {list(config.seeds)}"
    if calibration := config.calibration:
        there = len(config.slice(calibration.data))
        if calibration.sequences > there:
            yield f"calibration.sequences: {calibration.sequences}: {calibration.data} has {there}"
        tokens = calibration.sequences * config.corpora[calibration.data.split("/")[0]].length
        if calibration.rows > tokens:
            yield f"calibration.rows: {calibration.rows}: its sequences have {tokens} tokens"
    for name, model in config.models.items():
        tokenizer = config.tokenizers[model.tokenizer]
        if tokenizer.kind == "train" and tokenizer.vocab_size > model.vocab_size:
            yield (
                f"models.{name}.vocab_size: {model.vocab_size}, but its tokenizer "
                f"{model.tokenizer} has {tokenizer.vocab_size} tokens"
            )


def _bad_columns(config: Config) -> Iterator[str]:
    """A column's name must tell its suite, and a name must tell a table from a figure."""
    seen: dict[str, str] = dict.fromkeys(config.evaluation.suites, "the name of a suite")
    for name, suite in config.evaluation.suites.items():
        for column in suite.columns:
            if column in seen:
                yield f"evaluation.suites.{name}: column {column!r} is {seen[column]} already"
            seen[column] = f"a column of suite {name}"
    for name in sorted(config.tables.keys() & config.figures.keys()):
        yield f"figures.{name}: a table has this name already"


def _bad_needs(config: Config) -> Iterator[str]:
    """Parts that others need, and that are not there."""
    for name, method in config.methods.items():
        if method.calibrated and not config.calibration:
            yield f"methods.{name}: {method.algorithm} needs a `calibration`"
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            if "post" in table.columns and not config.recovery:
                yield f"tables.{name}: shows recovered models, so it needs a `recovery`"
        elif isinstance(table, SpeedTable):
            passes = config.benchmarks[table.benchmark].passes  # type: ignore[union-attr]
            if table.shows not in passes:
                yield f"tables.{name}.shows: {table.shows!r}: only {passes[0]} is measured"
    for name, figure in config.figures.items():
        if isinstance(figure, RankFigure):
            if "post" in figure.stages and not config.recovery:
                yield f"figures.{name}: shows recovered models, so it needs a `recovery`"
            if not config.analysis:
                yield f"figures.{name}: shows states, so it needs an `analysis`"


def _bad_sizes(config: Config) -> Iterator[str]:
    """Numbers beyond what a model or a sequence has."""
    for name, figure in config.figures.items():
        if isinstance(figure, RankFigure) and config.analysis:
            length = config.corpora[config.analysis.data.split("/")[0]].length
            if not config.analysis.skip < figure.tokens <= length:
                yield (
                    f"figures.{name}.tokens: {figure.tokens}: must lie above analysis.skip "
                    f"{config.analysis.skip} and within the {length} tokens of a sequence"
                )
        if isinstance(figure, SpectrumFigure):
            path, model = f"figures.{name}", config.models[figure.model]
            if figure.layer >= model.num_hidden_layers:
                yield f"{path}.layer: {figure.layer}: there are {model.num_hidden_layers} from 0 on"
            if figure.head >= model.num_heads:
                yield f"{path}.head: {figure.head}: there are {model.num_heads} from 0 on"
    cuts = {(variant.model, variant.ratio) for variant in config.variants()}
    for benchmark in config.benchmarks.values():
        if not isinstance(benchmark, MixerBenchmark):
            cuts |= {(model, ratio) for model in benchmark.models for ratio in benchmark.ratios}
    for model_name, ratio in sorted(cuts):
        try:
            width(config.models[model_name].head_k_dim, ratio)
        except InputError as error:
            yield f"models.{model_name}: {error}"


# --- reading ------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML without its silent traps: a key given twice is an error, and 1e-4 is a number."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_config(path: Path | str) -> Config:
    """Read a configuration. Every problem of the file is a line of the InputError.

    References and sizes are checked once all values are what they should be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise InputError(f"{path}: empty; see config/README.md for what belongs in it")
    return parse_config(data, str(path))


def parse_config(data: Any, origin: str) -> Config:
    """Check a configuration that is already a mapping; `origin` names it in messages."""
    if not isinstance(data, Mapping):
        raise InputError(f"{origin}: a {type(data).__name__}; a mapping of keys was expected")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _explain(detail)]
        raise InputError("\n".join(f"{origin}: {line}" for line in lines)) from None


def _explain(error: ErrorDetails) -> list[str]:
    """What is wrong, in lines that begin with the key's dotted path."""
    names, part = _follow(error["loc"])
    path, value, context = ".".join(names), error["input"], error.get("ctx", {})
    shown = "" if isinstance(value, dict | list) else f" {value!r}:"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match error["type"]:
        case "extra_forbidden":
            return [f"{path}: unknown key{nearest(names[-1], part.model_fields)}"]
        case "missing":
            return [f"{path}: missing: {part.model_fields[names[-1]].description}"]
        case "literal_error":
            return [f"{path}:{shown} unknown{nearest(str(value), _quoted(context['expected']))}"]
        case "union_tag_invalid":
            key, known = context["discriminator"].strip("'"), _quoted(context["expected_tags"])
            return [f"{path}.{key}: {context['tag']!r}: unknown{nearest(context['tag'], known)}"]
        case "union_tag_not_found":
            return [f"{path}.{context['discriminator'].strip(chr(39))}: missing"]
        case "value_error" if not path:
            return message.splitlines()
        case _:
            return [f"{path}:{shown} {message}"]


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _follow(location: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """The keys that lead to a place, and the section that holds the last of them.

    pydantic's locations also name the members of unions that it went through, and end in [key]
    where the key itself is wrong; a reader of the file would look for these in vain.
    """
    names: list[str] = []
    section: Any = Config
    here: Any = Config
    for piece in location:
        if piece == "[key]":
            break
        members = [member for member in _members(here) if member is not NoneType]
        if len(members) > 1:
            here = next(m for m in members if piece in _tags(m))
            continue
        here = members[0]
        names.append(str(piece))
        if isinstance(here, type) and issubclass(here, BaseModel):
            section = here
            field = here.model_fields.get(str(piece))
            here = field.annotation if field else Any
        else:
            here = (get_args(here) or (Any,))[-1 if get_origin(here) is dict else 0]
    return names, section


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, stripped of what Annotated adds."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(m for member in get_args(annotation) for m in _members(member))
    return (annotation,)


def _tags(section: Any) -> tuple[str, ...]:
    """The values by which a member of a union is chosen."""
    for name in ("kind", "architecture", "algorithm"):
        if name in section.model_fields:
            return get_args(section.model_fields[name].annotation)
    return ()


# --- the reference ------------------------------------------------------------------------------


INTRODUCTION = """\
# Configurations

| file | run |
|---|---|
| `demo.yaml` | the whole workflow at toy size: two CPU cores, minutes, no network |
| `lab.yaml` | the paper's head widths in small models: one GPU, local text |
| `paper.yaml` | everything the paper reports |

One file describes one run: `snakemake --configfile config/lab.yaml`. Files are never merged, so \
what is not in the file is not in the run. To make your own, copy one and change it; a mistake \
(an unknown key, a name that refers to nothing, a width that does not divide) is an error before \
any work starts. Editors that speak the YAML language server complete and check keys by \
`schema.json`.

In `paper.yaml`, `[P]` marks what the paper states and `[R]` what only the authors' repository \
does, with the place. `published/` holds the numbers that the paper prints. GPUs, memory and time \
belong to rules and profiles, never here.

Slices of a corpus, and which cells a table needs, are worked out by `keycut.config`: \
`load_config(path).variants("table")` lists the models that a table compares.

# Reference

Written by `python -m keycut.config`; do not edit.
"""


def reference() -> str:
    """config/README.md: what every key means."""
    seen: list[type[BaseModel]] = []
    _collect(Config, seen)
    return INTRODUCTION + "".join(_describe(section) for section in seen)


def schema() -> str:
    """config/schema.json."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


def _collect(annotation: Any, seen: list[type[BaseModel]]) -> None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            if member not in seen:
                seen.append(member)
                for field in member.model_fields.values():
                    _collect(field.annotation, seen)
        else:
            for inner in get_args(member):
                _collect(inner, seen)


def _describe(section: type[BaseModel]) -> str:
    rows = [
        f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {field.description} |\n"
        for name, field in section.model_fields.items()
    ]
    about = " ".join((section.__doc__ or "").split())
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return f"\n## {section.__name__}\n\n{about}\n\n{head}" + "".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.default)}`" if field.default not in (None, {}, ()) else "none"


def _type(annotation: Any) -> str:
    members = [member for member in _members(annotation) if member is not NoneType]
    return " or ".join(_type_of(member) for member in members)


def _type_of(member: Any) -> str:
    arguments = get_args(member)
    match get_origin(member):
        case origin if origin is Literal:
            return ", ".join(f"`{value}`" for value in arguments)
        case origin if origin is dict:
            return f"by name: {_type(arguments[1])}"
        case origin if origin is tuple:
            return f"list: {_type(arguments[0])}"
    if issubclass(member, BaseModel):
        return f"[{member.__name__}](#{member.__name__.lower()})"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[member]


def main(folder: Path) -> None:
    (folder / "schema.json").write_text(schema())
    (folder / "README.md").write_text(reference())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "config"))
