"""What is timed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from reproduction.config.section import WHICH, Cut, ModelName, Name, Pass, Section, Some
from statecut.models.shapes import Kernel

# Kernels take no wider keys.
HeadWidth = Annotated[int, Field(ge=1, le=256)]


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
    widths: Some[HeadWidth] = Field(description="head widths d_k, the first one the reference")
    passes: Some[Pass] = Field(description="forward, or forward and backward")
    batch: PositiveInt = Field(description="sequences")
    length: PositiveInt = Field(description="tokens in one sequence")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_heads: PositiveInt = Field(description="number of heads")
    head_v_dim: PositiveInt = Field(description="width of a head's values")


class ModelBenchmark(BenchmarkBase):
    """Throughput of whole models. Only their shapes count, so weights are random."""

    kind: Literal["model"] = WHICH
    models: Some[ModelName] = Field(description="models to be timed")
    ratios: Some[Cut] = Field(
        description="ratios, or widths KEYSxVALUES; the unpruned model is measured too"
    )
    passes: Some[Pass] = Field(description="forward, or a training step")
    batch: PositiveInt = Field(description="sequences")
    length: PositiveInt = Field(description="tokens in one sequence")
    graph: bool = Field(
        False,
        description="the forward pass as one CUDA graph too: small models wait for Python else",
    )

    def graphs(self, mode: str) -> bool:
        """Whether a pass is timed as a graph too."""
        return self.graph and mode == "forward"


class DecodingBenchmark(BenchmarkBase):
    """Generation with the recurrent state: throughput, state bytes, largest batch."""

    kind: Literal["decoding"] = WHICH
    models: Some[ModelName] = Field(description="models to be timed")
    ratios: Some[Cut] = Field(
        description="ratios, or widths KEYSxVALUES; the unpruned model is measured too"
    )
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
    tolerance: PositiveFloat = Field(
        description="largest relative error of outputs and gradients against fp32"
    )
