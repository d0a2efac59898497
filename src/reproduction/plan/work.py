"""What a job has to do, as far as time and disk depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from reproduction.config import TASKS, Config, MixerBenchmark, Model, Suite, shape_of
from reproduction.running.inputs import Inputs
from statecut.models.shapes import Kernel, Shape

WEIGHT = 4  # bytes: models are kept in float32, and those of the hub are no wider
TRAINED = 12  # bytes of a parameter in a checkpoint: itself and AdamW's two moments
CHECKPOINTS = 3  # two are kept, and a third is being written
# Documents of a task, times their choices where it has some; near enough for a plan, not counted.
REQUESTS = {
    "wikitext": 62, "lambada_openai": 5153, "arc_easy": 9501, "arc_challenge": 4687,
    "hellaswag": 40168, "piqa": 3676, "winogrande": 2534, "based_drop": 2090, "based_fda": 1102,
    "based_nq": 3160, "based_squadv2": 2984, "based_swde": 1111, "based_triviaqa": 1690,
    "demo_prose": 200, "demo_last_word": 200, "demo_choice": 800, "demo_recall": 200,
}  # fmt: skip
# Of an evaluation: tokens of a batch whose size is not set, of a choice with what stands before
# it (few are longer), and of an answer, which comes one token at a time. Its first token is a call
# of the model, and so is the capture of a graph that is replayed for the others, REPLAYS of which
# take as long as a call (16 sequences of a 1.3B: benchmarks/h200/speed.json).
BATCH, CHOICE, ANSWER, REPLAYS = 1 << 17, 128, 48, 20
# Of a refit: once through the unpruned model and three times through the pruned one, 8 sequences
# a call.
PASSES, REFIT_BATCH = 4, 8


@dataclass(frozen=True)
class Workload:
    """What one job does. What its rule does not depend on is absent."""

    of: str = ""  # which kind of the rule's work
    kernel: Kernel | None = None
    parameters: int | None = None
    tokens: int | None = None
    steps: int = 0  # of an evaluation or a refit: calls of the model
    shape: Shape | None = None  # what kernels are tuned for, once
    disk: int = 0  # bytes


class Workloads:
    """The work of every job of a run."""

    def __init__(self, config: Config) -> None:
        self.config, self.inputs = config, Inputs(config)
        self.cut = {self.inputs.paths.subject(v): (v.model, v.ratio) for v in self.inputs.variants}

    def of(self, rule: str, wildcards: Mapping[str, str]) -> Workload:
        """The work of one job."""
        config, inputs = self.config, self.inputs
        name, ratio = wildcards.get("model"), float(wildcards.get("ratio", 0))
        subject = wildcards.get("subject")
        if subject or rule == "recover":
            name, ratio = self.cut[subject or f"recovered/{name}/{wildcards['cut']}"]
        if name is None:
            return self._without_model(rule, wildcards)
        model = config.models[name]
        work = Workload("", model.kernel, model.parameters, shape=shape_of(model, ratio))
        kept = WEIGHT * parameters_at(model, ratio)
        match rule:
            case "pretrain":
                recipe, disk = inputs.recipe(name), CHECKPOINTS * TRAINED * model.parameters + kept
                return replace(work, of=recipe.trainer, tokens=self._tokens(recipe), disk=disk)
            case "calibrate":  # Gram matrices, eight to a head, in float64
                disk = len(model.mixer_shape.layers) * model.num_heads * 8 * model.head_k_dim**2 * 8
                return replace(work, tokens=self._tokens(config.calibration), disk=disk)
            case "score":
                return replace(work, of=config.methods[wildcards["method"]].algorithm)
            case "slice":
                return replace(work, disk=kept)
            case "refit":
                assert config.calibration
                calls = PASSES * ceil(config.calibration.sequences / REFIT_BATCH)
                tokens = PASSES * self._tokens(config.calibration)
                return replace(work, tokens=tokens, steps=calls, disk=kept)
            case "recover":
                return replace(work, tokens=self._tokens(config.recovery), disk=kept)
            case "evaluate":
                suite = config.evaluation.suites[wildcards["suite"]]
                hybrid = len(model.mixer_shape.layers) < model.num_hidden_layers
                return evaluation(work, suite, as_graph=not hybrid)
            case "analyze":
                return replace(work, tokens=inputs.length(wildcards["subject"]))
        return work  # adopt, whose weights are links

    def _without_model(self, rule: str, wildcards: Mapping[str, str]) -> Workload:
        config, inputs = self.config, self.inputs
        match rule:
            case "tokenizer":
                return Workload(config.tokenizers[wildcards["tokenizer"]].kind)
            case "tokens":
                corpus = config.corpora[wildcards["corpus"]]
                tokens = sum(corpus.slices.values()) * corpus.length
                wide = any(model.vocab_size > 1 << 16 for model in config.models.values())
                return Workload(corpus.kind, tokens=tokens, disk=tokens * (4 if wide else 2))
            case "preflight_shape":
                return Workload(wildcards["shape"], inputs.shapes[wildcards["shape"]].kernel)
            case "measure":
                cell = inputs.cell(wildcards["benchmark"], wildcards["measured"])
                benchmark = config.benchmarks[cell.benchmark]
                if isinstance(benchmark, MixerBenchmark):
                    return Workload(f"mixer-{benchmark.hidden_size}-{cell.mode}", cell.kernel)
                of = cell.mode if cell.mode == benchmark.kind else f"{benchmark.kind}-{cell.mode}"
                return Workload(of, cell.kernel, config.models[cell.subject].parameters)
        return Workload()

    def _tokens(self, settings: Any) -> int:
        return settings.sequences * self.config.corpora[settings.data.split("/")[0]].length


def evaluation(work: Workload, suite: Suite, *, as_graph: bool = True) -> Workload:
    """All tasks of a suite: tokens that are read, and calls of the model. Answers of models with
    softmax layers are not generated as a graph."""
    calls = 2 + ceil((ANSWER - 2) / REPLAYS) if as_graph else ANSWER
    tasks = sorted({task.task for task in suite.tasks.values() if not task.not_attempted})
    tokens = steps = 0
    for task in tasks:
        answers = "contains" in TASKS[task]
        length = suite.window if answers or "word_perplexity" in TASKS[task] else CHOICE
        tokens += REQUESTS[task] * length
        batches = ceil(REQUESTS[task] / (suite.batch or max(1, BATCH // length)))
        steps += batches * (1 + calls * answers)
    return replace(work, of="+".join(tasks), tokens=tokens, steps=steps)


def parameters_at(model: Model, ratio: float) -> int:
    """Parameters of a model of whose key channels that share is cut."""
    lost = model.num_heads * (model.head_k_dim - shape_of(model, ratio).width)
    # Each in q and in k: a row of the projection and, where they are not shared, a filter.
    taps = model.conv_size if model.filter_sharing == "none" else 0
    layers = len(model.mixer_shape.layers)
    return model.parameters - layers * 2 * lost * (model.hidden_size + taps)
