"""The plan of a run: what every rule costs, how long it all takes, and both as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from textwrap import wrap
from typing import Any, TypeVar

from reproduction.plan.costs import RULES, SAME, Estimate, MeasuredCost, estimate
from reproduction.plan.graph import DagJob, Graph
from reproduction.plan.work import Workload, Workloads
from statecut.errors import InputError
from statecut.models.shapes import Shape

T = TypeVar("T")
Span = list[float]  # seconds: the estimate, the least and the most that it may be
POWERS = (0, -1, 1)  # of a job's factor, for these three


@dataclass(frozen=True)
class Planned:
    """One job with its work and what it costs."""

    job: DagJob
    work: Workload
    cost: Estimate

    def seconds(self, power: float = 0) -> float:
        """What it still takes: 0 for the estimate, -1 and 1 for the least and the most."""
        return self.job.wanted * self.cost.seconds * self.cost.factor**power


def price(graph: Graph, costs: Sequence[MeasuredCost]) -> list[Planned]:
    """Every job with its cost. The first on a GPU with a shape tunes its kernels for all."""
    workloads, jobs = Workloads(graph.config), []
    tuned: set[Shape | None] = {None}
    for job in graph.jobs:
        work, cost = workloads.of(job.rule, job.wildcards), Estimate()
        if job.runs:
            tunes = job.gpus > 0 and work.shape not in tuned
            tuned |= {work.shape} if tunes else set()
            cost = estimate(costs, job.rule, work, gpus=job.gpus, cores=job.cores, tunes=tunes)
        jobs.append(Planned(job, work, cost))
    return jobs


def by_rule(things: Iterable[T], rule: Callable[[T], str]) -> dict[str, list[T]]:
    """In the order of the workflow, target rules at the end."""
    groups: dict[str, list[T]] = {name: [] for name in RULES}
    for thing in things:
        groups.setdefault(rule(thing), []).append(thing)
    return {name: members for name, members in groups.items() if members}


def make_plan(
    graph: Graph,
    costs: Sequence[MeasuredCost],
    *,
    targets: Sequence[str] = (),
    gpus: int | None = None,
) -> dict[str, Any]:
    """As it is written to a file; `to_text` is for people."""
    jobs = price(graph, costs)
    rules = by_rule(jobs, lambda planned: planned.job.rule)
    largest = ceil(max((planned.cost.gpus for planned in jobs), default=0))
    if gpus is not None and gpus < largest:
        raise InputError(f"--gpus {gpus}: one job alone asks for {largest}; give at least so many")
    # Where no job holds a GPU, cores are what is scarce.
    machine, unit = (gpus or graph.gpus, "GPU") if largest else (graph.cores, "core")
    counts = [machine] if machine else [max(1, largest) << doubled for doubled in range(3)]
    walls = {
        f"on {count:g} {unit}{'s' * (count > 1)}": wall_time(jobs, count, unit == "GPU")
        for count in counts
    }
    return {
        "run": graph.config.run,
        "targets": [*targets],
        "rules": [_sum(rule, members) for rule, members in rules.items()],
        "total": _sum("total", jobs),
        "walls": {**walls, "however many": wall_time(jobs)},
        "scaled": {rule: text for rule, members in rules.items() if (text := _scaled(members))},
        "machines": sorted({name for planned in jobs for name in planned.cost.machines}),
        "missing": [*graph.missing],
    }


def _sum(rule: str, jobs: list[Planned]) -> dict[str, Any]:
    """All jobs of one rule; times are of those that are still to run, disk is of all."""
    gpu_seconds = [sum(job.seconds(p) * job.cost.gpus for job in jobs) for p in POWERS]
    return {
        "rule": rule,
        "jobs": len(jobs),
        "to_run": sum(planned.job.wanted for planned in jobs),
        "gpus": max(planned.cost.gpus for planned in jobs),
        "longest": max(planned.seconds() for planned in jobs),
        "seconds": [sum(planned.seconds(power) for planned in jobs) for power in POWERS],
        "gpu_seconds": gpu_seconds,
        "disk": sum(planned.work.disk for planned in jobs),
    }


def wall_time(jobs: list[Planned], count: float | None = None, gpus: bool = False) -> Span:
    """On so many GPUs or cores: no less than the longest chain of jobs, nor than all work over all
    of them; and if jobs never wait for one, no more."""
    walls = []
    for power in POWERS:
        ends, work = [0.0], 0.0
        for planned in jobs:
            seconds = planned.seconds(power)
            ends.append(max(ends[place + 1] for place in [-1, *planned.job.after]) + seconds)
            work += seconds * (planned.cost.gpus if gpus else min(planned.job.cores, count or 1))
        walls.append(max(*ends, work / count if count else 0))
    return walls


def _scaled(jobs: list[Planned]) -> str:
    """How many jobs of a rule are estimated by figures of something else, and of what."""
    costs = [planned.cost for planned in jobs if planned.job.wanted and planned.cost.scaled]
    sources = ", ".join(sorted({source for cost in costs for source in cost.scaled}))
    factor = max((cost.factor for cost in costs), default=0)
    return f"{len(costs)} of {len(jobs)} jobs (x/ {factor:g}) from {sources}" if costs else ""


def to_text(plan: dict[str, Any]) -> str:
    total, targets = plan["total"], " ".join(plan["targets"]) or "everything"
    rows = [["rule", "jobs", "to run", "GPUs", "longest", "all", "GPU time", "range", "disk"]]
    for rule in [*plan["rules"], total]:
        counts = [rule["rule"], f"{rule['jobs']:,}", f"{rule['to_run']:,}", f"{rule['gpus']:.3g}"]
        times = [rule["longest"], rule["seconds"][0], rule["gpu_seconds"][0]]
        span = _range(rule["gpu_seconds"] if times[2] else rule["seconds"])
        rows.append([*counts, *map(duration, times), span, gigabytes(rule["disk"])])
    jobs = f"{total['jobs']:,} jobs, {total['to_run']:,} still to run"
    lines = [f"{plan['run']}: {targets}, {jobs}", "", *table(rows), ""]
    if total["to_run"]:
        walls = plan["walls"].items()
        lines += table([[f"wall time {on}", duration(wall[0]), _range(wall)] for on, wall in walls])
    if plan["missing"]:
        lines += wrap(f"not there yet: {', '.join(plan['missing'])}", 99, subsequent_indent="  ")
    lines.append(f"figures of {'; '.join(plan['machines'])}")
    if plan["scaled"]:
        lines += ["", f"ranges are half to twice (x/ {SAME:g}) by figures of the same work, kernel "
                  "and size; scaled from others:"]  # fmt: skip
    for rule, text in plan["scaled"].items():
        lines += wrap(f"{rule}: {text}", 99, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _range(span: Span) -> str:
    return f"{duration(span[1])} to {duration(span[2])}" if span[0] else ""


def duration(seconds: float) -> str:
    unit, size = ("s", 1) if seconds < 90 else ("min", 60) if seconds < 5400 else ("h", 3600)
    count = seconds / size
    return f"{count:,.{int(count < 9.95)}f} {unit}" if seconds else ""


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.{int(count < 9.95e9)}f} GB" if count else ""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]
