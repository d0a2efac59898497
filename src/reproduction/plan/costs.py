"""How long work takes, by the nearest figure that somebody measured (config/costs.yaml)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from reproduction.config.section import Many, Section
from reproduction.plan.work import Workload
from statecut.errors import InputError
from statecut.models.shapes import Kernel

# Rules with a script, in the order of the workflow; then what jobs of several rules have.
RULES = (
    "download", "text", "tokenizer", "tokens", "tasks", "preflight_shape", "pretrain", "adopt",
    "calibrate", "score", "slice", "refit", "recover", "evaluate", "measure", "analyze", "frame",
    "union", "table", "figure", "document", "pdf", "verdict", "page", "archive", "verify",
)  # fmt: skip
PARTS = ("start", "tuning", "forward", "step")

CLOSE = log(2)
SAME, SCALED = 2.0, 4.0
"""A job may take so many times more or less than estimated: by a figure of the same work, kernel
and, up to a factor of two, size; and by another. docs/lab.md, "What it took", has what they are
from."""


class MeasuredCost(Section):
    """One measurement; config/costs.yaml says at its top what each key means."""

    machine: str
    gpus: int = Field(ge=0)
    cores: PositiveInt | None = None
    command: str
    includes: Many[Literal["start", "tuning"]] = ()
    work: Literal[RULES + PARTS]  # type: ignore[valid-type]
    of: str = ""
    kernel: Kernel | None = None
    parameters: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seconds: PositiveFloat

    def difference(self, rule: str, work: Workload) -> str:
        """What it was measured on, as far as that is not this rule or this work."""
        count, far = (self.parameters or 0) / 1e6, abs(_times(self, work)) > CLOSE / 2
        size = f"{count:.2g}M" if count < 99.5 else f"{count / 1000:.2g}B"
        pairs = {
            self.work: rule,
            self.of: work.of,
            self.kernel: work.kernel,
            size: size * (not far),
        }
        return " ".join(mine for mine, other in pairs.items() if mine and mine != other)


@dataclass(frozen=True)
class Estimate:
    """What one job takes: seconds, and how many times more or less they may be."""

    seconds: float = 0.0
    factor: float = 1.0
    gpus: float = 0.0  # that it holds; none where its figure is of a CPU
    scaled: tuple[str, ...] = ()  # figures of something else that it comes from
    machines: tuple[str, ...] = ()


def read_costs(path: Path | str) -> list[MeasuredCost]:
    """Every figure, with the keys that all figures of a command share."""
    try:
        blocks = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["measured"]
        figures = [{**block, **figure} for block in blocks for figure in block.pop("figures")]
        return [MeasuredCost.model_validate(figure) for figure in figures]
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise InputError("\n".join(lines)) from None
    except (OSError, ValueError, TypeError, LookupError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as measured figures: {error}") from None


def estimate(
    costs: Sequence[MeasuredCost], rule: str, work: Workload, *, gpus: float = 0, cores: int = 1,
    tunes: bool = False,
) -> Estimate:  # fmt: skip
    """What a job takes; `tunes` if it is the first of its shape. What two jobs share (a task in two
    suites of a model) is counted in both, though the second finds it done."""
    own, figures = nearest_figure(costs, rule, work), {}
    if rule in ("evaluate", "refit") and not (own and distance(own, work) < CLOSE):
        # Nothing like it was measured: so many calls, and so many tokens through the model.
        parts = {"step": replace(work, of="", tokens=work.steps), "forward": replace(work, of="")}
        nearest = {part: nearest_figure(costs, name, part) for name, part in parts.items()}
        figures = {part: figure for part, figure in nearest.items() if figure}
    if own and not figures:
        figures = {work: own}
    on_gpu = gpus if not figures or any(figure.gpus for figure in figures.values()) else 0
    seconds, factor, scaled = 0.0, SAME, []
    for part, figure in figures.items():
        # On more GPUs or cores it takes less time, as if none were wasted. A share of a GPU is as
        # fast as all of it: shares are for work that leaves one idle.
        used, held = (figure.gpus, max(1, gpus)) if on_gpu else (figure.cores or cores, cores)
        seconds += scale(figure, part) * used / held
        if figure.work != rule or distance(figure, part) >= CLOSE:
            scaled.append(figure.difference(rule, part))
            factor = SCALED
        elif on_gpu > used:
            scaled.append(f"{used} GPU")
    if not figures:
        factor, scaled = SCALED, ["start alone"]
    for extra in ("start", "tuning") if tunes and on_gpu else ("start",):
        if not any(extra in figure.includes for figure in figures.values()):
            added = nearest_figure(costs, extra, Workload(kernel=work.kernel))
            if added is None:
                raise InputError(f"{rule}: the costs have no figure of {extra!r}, which it needs")
            seconds += added.seconds
    machines = tuple(figure.machine for figure in figures.values())
    return Estimate(seconds, factor, on_gpu, tuple(scaled), machines)


def nearest_figure(costs: Sequence[MeasuredCost], name: str, work: Workload) -> MeasuredCost | None:
    """The nearest figure, the latest of equals: min() takes the first."""
    figures = [figure for figure in reversed(costs) if figure.work == name]
    return min(figures, key=lambda figure: distance(figure, work), default=None)


def distance(figure: MeasuredCost, work: Workload) -> float:
    """e times the parameters count 1, the other kernel 1, another work 2 to 3."""
    far = 0.01 * (not figure.of) + 0.01 * (not figure.kernel)  # what says more is nearer
    far += abs(_times(figure, work))
    if figure.kernel and work.kernel:
        far += figure.kernel != work.kernel
    if figure.of and figure.of != work.of:
        mine, other = {*work.of.split("-")}, {*figure.of.split("-")}
        far += 3 - len(mine & other) / len(mine | other)
    return far


def _times(figure: MeasuredCost, work: Workload) -> float:
    """How many times larger the work's model is, as a logarithm."""
    mine, other = figure.parameters, work.parameters
    return log(other / mine) if mine and other else 0.0


def scale(figure: MeasuredCost, work: Workload) -> float:
    """n times the tokens, or n times the parameters, take n times as long; but to time a larger
    model takes no longer."""
    seconds = figure.seconds
    if figure.tokens and work.tokens is not None:
        seconds *= work.tokens / figure.tokens
    if figure.parameters and work.parameters and figure.work != "measure":
        seconds *= work.parameters / figure.parameters
    return seconds
