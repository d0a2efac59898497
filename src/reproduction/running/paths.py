"""The paths of a run's artefacts, which rules read and write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reproduction.config import BASELINE, Config, Cut, Measurement, Variant, cut_shape
from reproduction.running.provenance import PROVENANCE
from statecut.errors import InputError
from statecut.files import check_writable
from statecut.models.shapes import Shape

OWNER = "configuration.txt"
"""Holds the name of the configuration file that a run's results are of."""


@dataclass(frozen=True)
class Paths:
    """Paths below results/<run>."""

    config: Config

    @property
    def root(self) -> str:
        return f"results/{self.config.run}"

    @property
    def checkpoints(self) -> str:
        """Of unfinished jobs: no rule declares it, so that Snakemake does not delete it."""
        return f"{self.root}/.checkpoints"

    def tokens(self, data: str, model: str) -> str:
        """The packed corpus of a `corpus/slice`, in the tokens of a model."""
        return f"{self.root}/tokens/{data.split('/')[0]}/{self.config.models[model].tokenizer}"

    def base_model(self, model: str) -> str:
        return f"{self.root}/models/{model}"

    def calibration(self, model: str, method: str, target: str, seed: int | str) -> str:
        """Separate ones with gradients or values: a method more makes no other's again."""
        backward = "-gradients" if self.config.methods[method].needs_gradients else ""
        values = "-values" if target == "v" else ""
        return f"{self.root}/calibrations/{model}/{seed}{backward}{values}"

    def selections(
        self, model: str, method: str, target: str, cut: Cut, seed: int | str
    ) -> list[str]:
        """Which channels of keys, and of values, stay at every width; of the side that is cut."""
        left, full = cut_shape(self.config.models[model], cut), cut_shape(self.config.models[model])
        sides = [target] * (left.width < full.width) + ["v"] * (left.value_width < full.value_width)
        return [f"{self.root}/selections/{model}/{method}-{s}-{seed}.safetensors" for s in sides]

    def subject(self, variant: Variant) -> str:
        """The folder of a variant's model, as in the paths of what is measured on it."""
        name = f"{variant.model}/{cut(variant)}{'-matched' * (variant.eps == 'matched')}"
        if variant.recovered:
            return f"recovered/{name}{'-refitted' * variant.refitted}"
        if variant.refitted:
            return f"refitted/{name}"
        if variant.pruned:
            return f"sliced/{name}"
        return f"models/{variant.model}"

    def model(self, variant: Variant) -> str:
        return f"{self.root}/{self.subject(variant)}"

    def evaluation(self, variant: Variant, suite: str) -> str:
        return f"{self.root}/evaluations/{self.subject(variant)}/{suite}.json"

    def analysis(self, variant: Variant) -> str:
        return f"{self.root}/analyses/{self.subject(variant)}.npz"

    def preflight(self, shape: Shape) -> str:
        return f"{self.root}/preflight/{shape.name}.json"

    def measurement(self, cell: Measurement) -> str:
        width = cell.ratio if isinstance(cell.ratio, str) else cell.width
        name = f"{cell.subject}-{width}-{cell.mode}"
        return f"{self.root}/measurements/{cell.benchmark}/{name}.json"

    def frame(self, table: str) -> str:
        return f"{self.root}/frames/{table}.parquet"

    def table(self, table: str, ending: str = "tex") -> str:
        return f"{self.root}/tables/{table}.{ending}"

    def figure(self, figure: str, ending: str = "pdf") -> str:
        return f"{self.root}/figures/{figure}.{ending}"

    def curve(self, variant: Variant) -> str:
        """The loss curve of a model that was trained or recovered."""
        return f"{self.model(variant)}/loss.csv"

    def steps(self, variant: Variant) -> list[str]:
        """The records of how a variant was made: its base model, calibration if its method has
        one, selection, what it was recovered from if that was refitted, and itself."""
        steps = [f"{self.base_model(variant.model)}{PROVENANCE}"]
        if variant.pruned:
            sliced = self.config.student(variant) if variant.recovered else variant
            if self.config.methods[sliced.method].calibrated:
                chosen = sliced.model, sliced.method, sliced.target, sliced.seed
                steps.append(f"{self.calibration(*chosen)}{PROVENANCE}")
            steps += self.selections(
                sliced.model, sliced.method, sliced.target, sliced.ratio, sliced.seed
            )
        if variant.refitted and variant.recovered:
            steps.append(f"{self.model(self.config.student(variant))}{PROVENANCE}")
        return [*steps, f"{self.model(variant)}{PROVENANCE}"]

    def check_owner(self, file: str) -> None:
        """An error if the results of another configuration file are in this run's folder."""
        owner = Path(self.root) / OWNER
        if owner.is_file() and (other := owner.read_text().strip()) != file:
            advice = f"give the run of {file} another name"
            if self.config.rehearsal:  # whose name is always the same
                advice = f"delete {self.root} to rehearse {file}"
            raise InputError(f"{self.root} holds the results of {other}: {advice}")

    def record_owner(self, file: str) -> None:
        """Write which configuration file the results are of."""
        owner = check_writable(Path(self.root) / OWNER)
        owner.parent.mkdir(parents=True, exist_ok=True)
        owner.write_text(f"{file}\n")


def cut(variant: Variant) -> str:
    """Which channels were cut from a model, as in the names of files."""
    if not variant.pruned:
        return BASELINE
    return f"{variant.method}-{variant.target}-{variant.ratio}-{variant.seed}"
