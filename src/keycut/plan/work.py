"""What the jobs of each rule have to do, as far as time and disk depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from keycut.config import (
    BASELINE,
    Config,
    Kernel,
    MixerBenchmark,
    Model,
    Shape,
    shape_of,
    width,
)
from keycut.layout import Layout, cut

Wildcards = Mapping[str, str]

WEIGHT = 4  # bytes: models are trained and kept in float32, and those of the hub are no wider
TRAINED = 12  # bytes of a trained parameter in a checkpoint: itself and AdamW's two moments
CHECKPOINTS = 3  # two are kept, and a third is being written
DOUBLE = 8


@dataclass(frozen=True)
class Work:
    """One job's. What a rule does not depend on is absent."""

    of: tuple[str, ...] = ()  # which of the rule's works; of an evaluation, all its tasks
    kernel: Kernel | None = None
    parameters: int | None = None
    tokens: int | None = None
    shape: Shape | None = None  # what kernels are tuned for, once
    disk: int = 0  # bytes that stay
    scratch: int = 0  # bytes while it runs


class Works:
    """The work of every job of a run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        variants = config.variants()
        self.ratios = {(v.model, cut(v)): v.ratio for v in variants if v.pruned}
        at = Layout(config)
        self.cells = {
            (cell.benchmark, Path(at.measurement(cell)).stem): cell
            for cell in config.measurements()
        }
        self.shapes = {shape.name: shape for shape in config.trained_shapes()}
        self.lengths: dict[str, int] = {}  # tokens that are analysed, by subject
        for name, figure in config.figures.items():
            if figure.kind in ("spectrum", "utilization"):
                for subject in map(at.subject, config.analyses(name)):
                    self.lengths[subject] = max(self.lengths.get(subject, 0), figure.tokens)

    def of(self, rule: str, wildcards: Wildcards) -> Work:
        return RULES.get(rule, Works.small)(self, wildcards)

    def tokenizer(self, wildcards: Wildcards) -> Work:
        return Work(of=(self.config.tokenizers[wildcards["tokenizer"]].kind,))

    def packed(self, wildcards: Wildcards) -> Work:
        corpus = self.config.corpora[wildcards["corpus"]]
        tokens = sum(corpus.slices.values()) * corpus.length
        vocabulary = max(
            model.vocab_size
            for model in self.config.models.values()
            if model.tokenizer == wildcards["tokenizer"]
        )
        return Work(
            of=(corpus.kind,), tokens=tokens, disk=tokens * (2 if vocabulary <= 1 << 16 else 4)
        )

    def pretrained(self, wildcards: Wildcards) -> Work:
        model = self.config.models[wildcards["model"]]
        assert model.source.kind == "pretrain"
        recipe = self.config.recipes[model.source.recipe]
        return self._on(
            wildcards["model"],
            of=(recipe.trainer,),
            tokens=recipe.sequences * self._length(recipe.data),
            disk=WEIGHT * model.parameters,
            scratch=CHECKPOINTS * TRAINED * model.parameters,
        )

    def adopted(self, wildcards: Wildcards) -> Work:
        return Work(parameters=self.config.models[wildcards["model"]].parameters)  # links

    def calibrated(self, wildcards: Wildcards) -> Work:
        assert self.config.calibration is not None
        model, settings = self.config.models[wildcards["model"]], self.config.calibration
        heads = model.num_hidden_layers * model.num_heads
        # Eight Gram matrices and two saliencies per head, a norm per input (keycut.calibration).
        numbers = heads * (8 * model.head_k_dim**2 + 2 * model.head_k_dim)
        numbers += model.num_hidden_layers * model.hidden_size
        return self._on(
            wildcards["model"],
            tokens=settings.sequences * self._length(settings.data),
            disk=DOUBLE * numbers,
        )

    def scored(self, wildcards: Wildcards) -> Work:
        model = self.config.models[wildcards["model"]]
        algorithm = self.config.methods[wildcards["method"]].algorithm
        left, heads = self._width(wildcards), model.num_hidden_layers * model.num_heads
        rotated = algorithm in ("pca_proper", "pca_adversarial")
        numbers = left * model.head_k_dim if rotated else left + model.head_k_dim
        return Work(of=(algorithm,), parameters=model.parameters, disk=DOUBLE * heads * numbers)

    def sliced(self, wildcards: Wildcards) -> Work:
        model = self.config.models[wildcards["model"]]
        disk = WEIGHT * parameters_at(model, self._width(wildcards))
        return Work(parameters=model.parameters, disk=disk)

    def recovered(self, wildcards: Wildcards) -> Work:
        assert self.config.recovery is not None
        settings, model = self.config.recovery, self.config.models[wildcards["model"]]
        left = self._width(wildcards)
        return self._on(
            wildcards["model"],
            left,
            tokens=settings.sequences * self._length(settings.data),
            disk=WEIGHT * parameters_at(model, left),
        )

    def checked(self, wildcards: Wildcards) -> Work:
        return Work(of=(wildcards["shape"],), kernel=self.shapes[wildcards["shape"]].kernel)

    def evaluated(self, wildcards: Wildcards) -> Work:
        tasks = self.config.evaluation.suites[wildcards["suite"]].tasks.values()
        names = {task.task for task in tasks if not task.not_attempted}
        return self._on(*self._subject(wildcards["subject"]), of=tuple(sorted(names)))

    def analysed(self, wildcards: Wildcards) -> Work:
        subject = wildcards["subject"]
        return self._on(*self._subject(subject), tokens=self.lengths[subject])

    def measured(self, wildcards: Wildcards) -> Work:
        cell = self.cells[wildcards["benchmark"], wildcards["measured"]]
        benchmark = self.config.benchmarks[cell.benchmark]
        if isinstance(benchmark, MixerBenchmark):
            heads, values = benchmark.num_heads, benchmark.head_v_dim
            shape = Shape(cell.kernel, heads, cell.width, heads, values)
            of = f"mixer-{benchmark.hidden_size}-{cell.does}"
            return Work(of=(of,), kernel=cell.kernel, shape=shape)
        of = cell.does if cell.does == benchmark.kind else f"{benchmark.kind}-{cell.does}"
        return self._on(cell.subject, cell.width, of=(of,))

    def small(self, wildcards: Wildcards) -> Work:
        """Of rules whose jobs are all alike."""
        return Work()

    def _subject(self, subject: str) -> tuple[str, int]:
        """The model, and key channels left, of models/M, sliced/M/CUT or recovered/M/CUT."""
        _, model, *rest = subject.split("/")
        return model, self._width({"model": model, "cut": rest[0] if rest else BASELINE})

    def _on(
        self,
        name: str,
        left: int | None = None,
        *,
        of: tuple[str, ...] = (),
        tokens: int | None = None,
        disk: int = 0,
        scratch: int = 0,
    ) -> Work:
        """Something that a model runs for, whole or with `left` key channels in a head."""
        model = self.config.models[name]
        shape = replace(shape_of(model), width=left or model.head_k_dim)
        return Work(of, model.kernel, model.parameters, tokens, shape, disk, scratch)

    def _width(self, wildcards: Wildcards) -> int:
        """Key channels that are left in a head."""
        if "ratio" in wildcards:
            ratio = float(wildcards["ratio"])
        else:
            ratio = self.ratios.get((wildcards["model"], wildcards["cut"]), 0.0)
        return width(self.config.models[wildcards["model"]].head_k_dim, ratio)

    def _length(self, data: str) -> int:
        return self.config.corpora[data.split("/")[0]].length


# In the order of the workflow.
RULES: dict[str, Callable[[Works, Wildcards], Work]] = {
    "download": Works.small,
    "text": Works.small,
    "tokenizer": Works.tokenizer,
    "tokens": Works.packed,
    "tasks": Works.small,
    "preflight_shape": Works.checked,
    "pretrain": Works.pretrained,
    "adopt": Works.adopted,
    "calibrate": Works.calibrated,
    "score": Works.scored,
    "slice": Works.sliced,
    "recover": Works.recovered,
    "evaluate": Works.evaluated,
    "measure": Works.measured,
    "analyze": Works.analysed,
    "frame": Works.small,
    "union": Works.small,
    "table": Works.small,
    "figure": Works.small,
    "document": Works.small,
    "pdf": Works.small,
    "verdict": Works.small,
    "page": Works.small,
    "verify": Works.small,
}


def parameters_at(model: Model, left: int) -> int:
    """Parameters of a model with `left` key channels in a head."""
    lost = model.num_heads * (model.head_k_dim - left)
    # Each in q and in k: a row of the projection and, where they are not shared, a filter.
    taps = model.conv_size if model.conv_sharing == "none" else 0
    return model.parameters - model.num_hidden_layers * 2 * lost * (model.hidden_size + taps)
