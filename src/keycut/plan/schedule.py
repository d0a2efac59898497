"""How long jobs take side by side: a list schedule, and the path that no machine shortens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import Any

from keycut.errors import InputError


@dataclass(frozen=True)
class Task:
    """A job as a scheduler sees it."""

    seconds: float
    gpus: float = 0
    cores: int = 1
    after: tuple[int, ...] = ()  # places of tasks that stand before it in the list


@dataclass(frozen=True)
class Capacity:
    """What can be in use at once; None is as much as is asked for."""

    gpus: float | None = None
    cores: int | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Schedule:
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)


def urgencies(tasks: Sequence[Task]) -> list[float]:
    """Of each task: seconds from its start to the end of the longest chain that waits for it."""
    found = [task.seconds for task in tasks]
    for place in range(len(tasks) - 1, -1, -1):
        for before in tasks[place].after:
            found[before] = max(found[before], tasks[before].seconds + found[place])
    return found


def critical_path(tasks: Sequence[Task]) -> float:
    """Seconds with as much of everything as is asked for."""
    return max(urgencies(tasks), default=0.0)


def list_schedule(tasks: Sequence[Task], capacity: Capacity) -> Schedule:
    """Whenever something ends, start whatever fits, the most urgent first.

    GPUs are one pool: that those of one job may have to be in one machine is not looked at.
    """
    urgency = urgencies(tasks)
    needs = [_needs(task, capacity) for task in tasks]
    most = (capacity.gpus, capacity.cores, capacity.jobs)
    free: list[Any] = [inf if one is None else _exact(one) for one in most]
    waiting = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for place, task in enumerate(tasks):
        for before in set(task.after):
            followers[before].append(place)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    ready = sorted(
        (place for place, left in enumerate(waiting) if not left), key=lambda i: -urgency[i]
    )
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        held = []
        for place in ready:
            if all(need <= left for need, left in zip(needs[place], free, strict=True)):
                free = [left - need for need, left in zip(needs[place], free, strict=True)]
                starts[place], ends[place] = now, now + tasks[place].seconds
                heapq.heappush(running, (ends[place], place))
            else:
                held.append(place)
        now = running[0][0]
        while running and running[0][0] == now:
            _, place = heapq.heappop(running)
            free = [left + need for need, left in zip(needs[place], free, strict=True)]
            for follower in followers[place]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    held.append(follower)
        ready = sorted(held, key=lambda i: -urgency[i])
    return Schedule(tuple(starts), tuple(ends))


def _needs(task: Task, capacity: Capacity) -> tuple[Fraction, int, int]:
    """GPUs, cores and jobs. Snakemake gives a job that asks for more cores than there are all."""
    if capacity.gpus is not None and task.gpus > capacity.gpus:
        raise InputError(
            f"{capacity.gpus} GPUs: one job alone asks for {task.gpus}; give at least so many"
        )
    cores = task.cores if capacity.cores is None else min(task.cores, capacity.cores)
    return _exact(task.gpus), cores, 1


def _exact(gpus: float) -> Fraction:
    """Shares of a GPU add up to it; their floats need not."""
    return Fraction(gpus).limit_denominator(10_000)
