"""The plan of a run: what every rule costs, how long it all takes, and both as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from textwrap import wrap
from typing import Any, TypeVar

from keycut.config import Shape
from keycut.errors import InputError
from keycut.plan.costs import RULES, SAME, Estimate, Figure, estimate
from keycut.plan.graph import DagJob, Graph
from keycut.plan.work import Workload, Workloads

T = TypeVar("T")
Span = list[float]  # an estimate in seconds, the least and the most that it may be
POWERS = (0, -1, 1)  # of a job's factor, for these three


@dataclass(frozen=True)
class Planned:
    """One job with its work and what it costs."""

    job: DagJob
    work: Workload
    cost: Estimate

    def at(self, power: float) -> float:
        """Seconds that it still takes."""
        return self.job.wanted * self.cost.seconds * self.cost.factor**power


def price(graph: Graph, costs: Sequence[Figure]) -> list[Planned]:
    """Every job with its cost. The first on a GPU with a shape tunes its kernels for all."""
    works, planned = Workloads(graph.config), []
    tuned: set[Shape | None] = {None}
    for job in graph.jobs:
        work, cost = works.of(job.rule, job.wildcards), Estimate()
        if job.runs:
            tunes = job.gpus > 0 and work.shape not in tuned
            tuned |= {work.shape} if tunes else set()
            cost = estimate(costs, job.rule, work, gpus=job.gpus, cores=job.cores, tunes=tunes)
        planned.append(Planned(job, work, cost))
    return planned


def by_rule(things: Iterable[T], rule: Callable[[T], str]) -> dict[str, list[T]]:
    """In the order of the workflow, target rules at the end."""
    found: dict[str, list[T]] = {name: [] for name in RULES}
    for thing in things:
        found.setdefault(rule(thing), []).append(thing)
    return {name: members for name, members in found.items() if members}


def make_plan(
    graph: Graph, costs: Sequence[Figure], *, targets: Sequence[str] = (), gpus: int | None = None
) -> dict[str, Any]:
    """As it is written to a file; `to_text` is for people."""
    planned = price(graph, costs)
    rules = by_rule(planned, lambda one: one.job.rule)
    most = ceil(max((one.cost.gpus for one in planned), default=0))
    if gpus is not None and gpus < most:
        raise InputError(f"--gpus {gpus}: one job alone asks for {most}; give at least so many")
    # Where no job holds a GPU, cores are what is scarce.
    given, unit = (gpus or graph.gpus, "GPU") if most else (graph.cores, "core")
    walls = {
        f"on {there:g} {unit}{'s' * (there > 1)}": _wall(planned, there, unit == "GPU")
        for there in ([given] if given else [max(1, most) << doubled for doubled in range(3)])
    }
    return {
        "run": graph.config.run,
        "targets": [*targets],
        "rules": [_rule(rule, members) for rule, members in rules.items()],
        "total": _rule("total", planned),
        "walls": {**walls, "however many": _wall(planned)},
        "scaled": {rule: said for rule, members in rules.items() if (said := _scaled(members))},
        "machines": sorted({name for one in planned for name in one.cost.machines}),
        "missing": [*graph.missing],
    }


def _rule(rule: str, members: list[Planned]) -> dict[str, Any]:
    """All jobs of one rule; times are of those that are still to run, disk is of all."""
    return {
        "rule": rule,
        "jobs": len(members),
        "to_run": sum(one.job.wanted for one in members),
        "gpus": max(one.cost.gpus for one in members),
        "longest": max(one.at(0) for one in members),
        "seconds": [sum(one.at(power) for one in members) for power in POWERS],
        "gpu_seconds": [sum(one.at(p) * one.cost.gpus for one in members) for p in POWERS],
        "disk": sum(one.work.disk for one in members),
    }


def _wall(planned: list[Planned], there: float | None = None, gpus: bool = False) -> Span:
    """No run is shorter than its longest chain of jobs, nor than all work over all GPUs or cores;
    and if those never wait, it is no longer."""
    walls = []
    for power in POWERS:
        ends, work = [0.0], 0.0
        for one in planned:
            ends.append(max(ends[place + 1] for place in [-1, *one.job.after]) + one.at(power))
            work += one.at(power) * (one.cost.gpus if gpus else min(one.job.cores, there or 1))
        walls.append(max(*ends, work / there if there else 0))
    return walls


def _scaled(members: list[Planned]) -> str:
    some = [one.cost for one in members if one.job.wanted and one.cost.scaled]
    figures = ", ".join(sorted({figure for cost in some for figure in cost.scaled}))
    factor = max((cost.factor for cost in some), default=0)
    return f"{len(some)} of {len(members)} jobs (x/ {factor:g}) from {figures}" if some else ""


def to_text(plan: dict[str, Any]) -> str:
    total, targets = plan["total"], " ".join(plan["targets"]) or "everything"
    rows = [["rule", "jobs", "to run", "GPUs", "longest", "all", "GPU time", "range", "disk"]]
    for rule in [*plan["rules"], total]:
        counts = [rule["rule"], f"{rule['jobs']:,}", f"{rule['to_run']:,}", f"{rule['gpus']:.3g}"]
        times = [rule["longest"], rule["seconds"][0], rule["gpu_seconds"][0]]
        ranged = _range(rule["gpu_seconds"] if times[2] else rule["seconds"])
        rows.append([*counts, *map(duration, times), ranged, gigabytes(rule["disk"])])
    jobs = f"{total['jobs']:,} jobs, {total['to_run']:,} still to run"
    lines = [f"{plan['run']}: {targets}, {jobs}", "", *table(rows), ""]
    if total["to_run"]:
        walls = plan["walls"].items()
        lines += table([[f"wall time {on}", duration(one[0]), _range(one)] for on, one in walls])
    if plan["missing"]:
        lines += wrap(f"not there yet: {', '.join(plan['missing'])}", 99, subsequent_indent="  ")
    lines.append(f"figures of {'; '.join(plan['machines'])}")
    if plan["scaled"]:
        lines += ["", f"ranges are half to twice (x/ {SAME:g}) by figures of the same work, kernel "
                  "and size; scaled from others:"]  # fmt: skip
    for name, said in plan["scaled"].items():
        lines += wrap(f"{name}: {said}", 99, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _range(span: Span) -> str:
    return f"{duration(span[1])} to {duration(span[2])}" if span[0] else ""


def duration(seconds: float) -> str:
    unit, one = ("s", 1) if seconds < 90 else ("min", 60) if seconds < 5400 else ("h", 3600)
    count = seconds / one
    return f"{count:,.{int(count < 9.95)}f} {unit}" if seconds else ""


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.{int(count < 9.95e9)}f} GB" if count else ""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]
