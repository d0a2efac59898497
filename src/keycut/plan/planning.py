"""The plan of a run: what every rule costs, and how long it all takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, TypeVar

from keycut.config import Shape
from keycut.plan.costs import Costs, Estimate, Measured, Missing, estimate
from keycut.plan.graph import Graph, Job
from keycut.plan.schedule import Capacity, Task, critical_path, list_schedule
from keycut.plan.work import RULES, Work, Works

T = TypeVar("T")

DOUBLINGS = 5


@dataclass(frozen=True)
class Planned:
    """One job with its work and what it costs."""

    job: Job
    work: Work
    cost: Estimate


@dataclass(frozen=True)
class RulePlan:
    """All jobs of one rule. Times are of those that are still to run, and what is known of them."""

    rule: str
    jobs: int
    to_run: int
    gpus: float  # of one job, at most
    seconds: float
    longest: float
    gpu_seconds: float
    complete: bool  # whether all of it was measured
    limit_s: float | None
    attempts: int  # that the longest job needs, if each ends at the limit
    disk: int  # bytes that stay
    scratch: int  # bytes more while a job of it runs


@dataclass(frozen=True)
class Wall:
    """Seconds from the first start to the last end."""

    capacity: Capacity
    seconds: float


@dataclass(frozen=True)
class Plan:
    run: str
    targets: tuple[str, ...]
    executor: str
    submitted: int  # jobs to run that are more than a target
    retries: int
    rules: tuple[RulePlan, ...]
    walls: tuple[Wall, ...]
    critical_path: float
    missing: tuple[Missing, ...]
    measured: tuple[Measured, ...]  # whose figures were used

    @property
    def jobs(self) -> int:
        return sum(rule.jobs for rule in self.rules)

    @property
    def to_run(self) -> int:
        return sum(rule.to_run for rule in self.rules)

    @property
    def gpu_seconds(self) -> float:
        return sum(rule.gpu_seconds for rule in self.rules)

    @property
    def seconds(self) -> float:
        return sum(rule.seconds for rule in self.rules)

    @property
    def disk(self) -> int:
        return sum(rule.disk for rule in self.rules)

    @property
    def complete(self) -> bool:
        return not self.missing

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(replace(self, measured=())),
            "measured": [measured.model_dump(mode="json") for measured in self.measured],
            "jobs": self.jobs,
            "to_run": self.to_run,
            "seconds": self.seconds,
            "gpu_seconds": self.gpu_seconds,
            "disk": self.disk,
            "complete": self.complete,
        }


def make_plan(
    graph: Graph, costs: Costs, *, targets: Sequence[str] = (), gpus: int | None = None
) -> Plan:
    """From the jobs to what they cost; with a number of GPUs, or at several."""
    planned = price(graph, costs)
    to_run = [one for one in planned if one.job.wanted]
    tasks = _tasks(planned)
    return Plan(
        run=graph.config.run,
        targets=tuple(targets),
        executor=graph.executor,
        submitted=sum(one.job.runs for one in to_run),
        retries=graph.retries,
        rules=tuple(_rules(planned, limited=graph.executor != "local")),
        walls=tuple(
            Wall(capacity, list_schedule(tasks, capacity).makespan)
            for capacity in capacities(graph.capacity, tasks, gpus)
        ),
        critical_path=critical_path(tasks),
        missing=tuple(dict.fromkeys(m for one in to_run for m in one.cost.missing)),
        measured=_used(to_run),
    )


def afresh(graph: Graph) -> Graph:
    """As if nothing had run."""
    return replace(graph, jobs=tuple(replace(job, wanted=True) for job in graph.jobs))


def price(graph: Graph, costs: Costs) -> list[Planned]:
    """Every job with its cost. The first to run a shape tunes its kernels for all, unless a job
    that is done already has."""
    works = Works(graph.config)
    described = [(job, works.of(job.rule, job.wildcards)) for job in graph.jobs]
    tuned: set[Shape | None] = {None, *(work.shape for job, work in described if not job.wanted)}
    planned = []
    for job, work in described:
        if not job.runs:
            planned.append(Planned(job, work, Estimate(0.0, 0)))
            continue
        tunes = work.shape not in tuned
        tuned.add(work.shape)
        planned.append(Planned(job, work, estimate(costs, job.rule, work, job.gpus, tunes=tunes)))
    return planned


def capacities(given: Capacity, tasks: Sequence[Task], gpus: int | None) -> list[Capacity]:
    """What to plan for: the number of GPUs asked for, or the profile's, or a few to choose from.

    Where no job needs a GPU, cores are what is scarce.
    """
    most = ceil(max((task.gpus for task in tasks), default=0))
    if gpus is not None:
        return [replace(given, gpus=gpus)]
    if most and given.gpus is None:
        return [replace(given, gpus=most << doubled) for doubled in range(DOUBLINGS)]
    if not most and given.cores is None and given.jobs is None:
        return [replace(given, cores=1 << doubled) for doubled in range(DOUBLINGS)]
    return [given]


def _tasks(planned: Sequence[Planned]) -> list[Task]:
    """What is done already takes no time and holds nothing."""
    return [
        Task(one.cost.seconds, one.cost.gpus, one.job.cores, one.job.after)
        if one.job.wanted and one.job.runs
        else Task(0.0, cores=0, after=one.job.after)
        for one in planned
    ]


def by_rule(things: Iterable[T], rule: Callable[[T], str]) -> dict[str, list[T]]:
    """In the order of the workflow, target rules at the end."""
    found: dict[str, list[T]] = {name: [] for name in RULES}
    for thing in things:
        found.setdefault(rule(thing), []).append(thing)
    return {name: members for name, members in found.items() if members}


def _rules(planned: Iterable[Planned], *, limited: bool) -> Iterable[RulePlan]:
    """`limited` where something ends jobs at their time limit."""
    for rule, members in by_rule(planned, lambda one: one.job.rule).items():
        wanted = [one for one in members if one.job.wanted]
        longest = max((one.cost.seconds for one in wanted), default=0.0)
        limit = max(one.job.limit_s or 0.0 for one in members) if limited else 0.0
        yield RulePlan(
            rule=rule,
            jobs=len(members),
            to_run=len(wanted),
            gpus=max(one.cost.gpus for one in members),
            seconds=sum(one.cost.seconds for one in wanted),
            longest=longest,
            gpu_seconds=sum(one.cost.seconds * one.cost.gpus for one in wanted),
            complete=not any(one.cost.missing for one in wanted),
            limit_s=limit or None,
            attempts=max(1, ceil(longest / limit)) if limit else 1,
            disk=sum(one.work.disk for one in members),
            scratch=max(one.work.scratch for one in members),
        )


def _used(planned: Iterable[Planned]) -> tuple[Measured, ...]:
    found: list[Measured] = []
    for measured in (measured for one in planned for measured in one.cost.by):
        if measured not in found:
            found.append(measured)
    return tuple(found)
