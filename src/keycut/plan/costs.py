"""How long work takes, from figures that somebody measured (config/costs.yaml)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from keycut.config.section import Kernel, Many, Section, Some
from keycut.errors import InputError, nearest
from keycut.plan.work import RULES, Work

FILE = Path("config/costs.yaml")

REACH = 10.0
"""A figure serves models up to this many times larger or smaller than the one it was measured on.
Farther away it would be a guess."""

EXTRAS = ("start", "tuning")

TIMED = "measure"
"""The rule that times cells: so many runs, a search and a choice of tiles take no longer with a
larger model."""


class Figure(Section):
    """One measurement. A job with n times the tokens, or a model with n times the parameters,
    takes n times as long."""

    work: str = Field(description="a rule of the workflow, or start, or tuning")
    of: str = Field("", description="which of the rule's works; any if absent")
    kernel: Kernel | None = Field(None, description="which delta rule; both if absent")
    parameters: PositiveInt | None = Field(None, description="of the model")
    tokens: PositiveInt | None = Field(None, description="how many in these seconds")
    seconds: PositiveFloat = Field(description="what it took")


class Measured(Section):
    """What one command measured on one machine."""

    machine: str = Field(description="the GPU, or the CPU where none was used")
    gpus: int = Field(description="how many of them together, 0 for a CPU", ge=0)
    command: str = Field(description="what was run")
    includes: Many[Literal["start", "tuning"]] = Field(
        (), description="what the seconds hold beside the work itself"
    )
    figures: Some[Figure] = Field(description="what was found")


class Costs(Section):
    measured: Many[Measured] = Field(description="later ones go before earlier ones")


@dataclass(frozen=True)
class Missing:
    """A figure that is not there."""

    work: str
    of: str = ""
    kernel: str | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Estimate:
    """What one job takes. `seconds` is the part of it that is known."""

    seconds: float
    gpus: float  # that it holds; none where its figure is of a CPU
    missing: tuple[Missing, ...] = ()
    by: tuple[Measured, ...] = ()


def read_costs(path: Path | str = FILE) -> Costs:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        costs = Costs.model_validate(data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    except ValidationError as error:
        lines = (
            f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        )
        raise InputError("\n".join(lines)) from None
    known = [*RULES, *EXTRAS]
    for _, figure in _figures(costs):
        if figure.work not in known:
            raise InputError(f"{path}: work {figure.work!r}{nearest(figure.work, known)}")
    return costs


def estimate(costs: Costs, rule: str, work: Work, gpus: float, *, tunes: bool) -> Estimate:
    """What a job takes that asks for so many GPUs; `tunes` if it is the first of its shape.

    A task that two suites of a model share is counted in both, though one finds it done.
    """
    together = best(costs, rule, "+".join(work.of), work)
    if together or len(work.of) < 2:
        parts = {"+".join(work.of): together}
    else:
        parts = {one: best(costs, rule, one, work) for one in work.of}
    found = [part for part in parts.values() if part]
    missing = [
        Missing(rule, of, work.kernel, work.parameters) for of, part in parts.items() if not part
    ]
    if not found:
        return Estimate(0.0, gpus, tuple(missing))
    seconds = sum(scaled(figure, work) * shared(measured.gpus, gpus) for measured, figure in found)
    by = [measured for measured, _ in found]
    where = by[0]
    wanted = ["start"] + (["tuning"] if tunes and where.gpus else [])
    for extra in wanted:
        if extra in where.includes:
            continue
        kernel = work.kernel if extra == "tuning" else None
        added = best(costs, extra, "", Work(kernel=kernel), machine=where.machine)
        if added is None:
            missing.append(Missing(extra, kernel=kernel))
        else:
            seconds += added[1].seconds
    return Estimate(seconds, gpus if where.gpus else 0, tuple(missing), tuple(by))


def best(
    costs: Costs, work: str, of: str, asked: Work, *, machine: str | None = None
) -> tuple[Measured, Figure] | None:
    """The figure nearest in size; of equals the one that says more, then the later one."""
    fitting = [
        (measured, figure)
        for measured, figure in _figures(costs)
        if figure.work == work
        and figure.of in ("", of)
        and figure.kernel in (None, asked.kernel)
        and machine in (None, measured.machine)
        and distance(figure, asked) <= log(REACH)
    ]

    def fitness(found: tuple[Measured, Figure]) -> tuple[float, int]:
        _, figure = found
        return -distance(figure, asked), bool(figure.of) + bool(figure.kernel)

    # max() takes the first of equals.
    return max(reversed(fitting), key=fitness, default=None)


def _figures(costs: Costs) -> Iterator[tuple[Measured, Figure]]:
    return ((measured, figure) for measured in costs.measured for figure in measured.figures)


def distance(figure: Figure, work: Work) -> float:
    """How many times larger or smaller the model is, as a logarithm."""
    if figure.parameters is None or work.parameters is None:
        return 0.0
    return abs(log(work.parameters / figure.parameters))


def scaled(figure: Figure, work: Work) -> float:
    """Seconds of this work, on as many GPUs as the figure was measured on."""
    seconds = figure.seconds
    if figure.tokens is not None and work.tokens is not None:
        seconds *= work.tokens / figure.tokens
    if figure.parameters is not None and work.parameters is not None and figure.work != TIMED:
        seconds *= work.parameters / figure.parameters
    return seconds


def shared(measured: int, gpus: float) -> float:
    """How much less time work takes when it is shared by more GPUs, none of them wasted.

    A share of one is as fast as all of it: shares are for work that leaves a GPU idle.
    """
    return measured / max(1, gpus) if measured and gpus else 1.0
