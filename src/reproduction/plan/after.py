"""After a run: how long its jobs really took, against the plan; and figures for the next one."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil, log2
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from reproduction.plan.planning import Planned, by_rule, duration, gigabytes, table
from reproduction.running.provenance import Provenance, read_timing
from statecut.errors import InputError
from statecut.files import atomic_write


@dataclass(frozen=True)
class FinishedJob:
    planned: Planned
    seconds: float  # Snakemake's, from the start to the end of its process
    gpus: tuple[str, ...]
    gpu_seconds: float
    disk: int  # bytes of its outputs; of a link, its own
    started: float


SUMS: dict[str, Callable[[FinishedJob], float]] = {
    "planned_s": lambda job: job.planned.cost.seconds,
    "took_s": lambda job: job.seconds,
    "planned_gpu_s": lambda job: job.planned.cost.seconds * job.planned.cost.gpus,
    "took_gpu_s": lambda job: job.gpu_seconds,
    "planned_disk": lambda job: job.planned.work.disk,
    "disk": lambda job: job.disk,
}


def finished_jobs(run: str, jobs: Iterable[Planned]) -> list[FinishedJob]:
    """The jobs that have left a timing and a provenance."""
    finished = []
    for planned in (planned for planned in jobs if planned.job.timing and planned.job.outputs):
        timing, outputs = Path(planned.job.timing or ""), [*map(Path, planned.job.outputs)]
        record = Provenance.read(outputs[0])
        if record is None or not timing.is_file():
            continue
        seconds = sum(float(row["s"]) for row in read_timing(timing))
        gpus = tuple(record.gpus[: ceil(planned.job.gpus)])  # it may see more than it asked for
        gpu_seconds = seconds * len(gpus) * record.gpu_share
        files = (file for path in outputs for file in (path, *path.rglob("*")))
        disk = sum(f.lstat().st_size for f in files if f.is_symlink() or f.is_file())
        started = datetime.fromisoformat(record.started).timestamp()
        finished.append(FinishedJob(planned, seconds, gpus, gpu_seconds, disk, started))
    if not finished:
        raise InputError(f"no job of {run} has left a timing: there is nothing to compare")
    return finished


def compare(jobs: Sequence[FinishedJob]) -> list[dict[str, Any]]:
    """Rule by rule, and in all, what finished jobs were planned to take, and took."""
    rules = {**by_rule(jobs, lambda job: job.planned.job.rule), "total": [*jobs]}
    return [
        {"rule": rule, "jobs": len(some)} | {key: sum(map(of, some)) for key, of in SUMS.items()}
        for rule, some in rules.items()
    ]


def comparison_text(run: str, jobs: Sequence[FinishedJob]) -> str:
    rows = [["rule", "jobs", "planned", "took", "ratio", "GPU time", "took", "disk", "took"]]
    for row in compare(jobs):
        planned, took, *gpu = (row[key] for key in [*SUMS][:4])
        times = [duration(planned), duration(took), f"{took / planned:.2f}", *map(duration, gpu)]
        disk = [gigabytes(row["planned_disk"]), gigabytes(row["disk"])]
        rows.append([row["rule"], f"{row['jobs']:,}", *times, *disk])
    wall = max(job.started + job.seconds for job in jobs) - min(job.started for job in jobs)
    lines = [f"{run}: planned, and what it took", "", *table(rows), ""]
    return "\n".join([*lines, f"from the first start to the last end: {duration(wall)}"]) + "\n"


def write_figures(path: Path | str, run: str, jobs: Sequence[FinishedJob]) -> None:
    """What a run measured, in the form of config/costs.yaml: a mean for each kind of work."""
    blocks: dict[tuple[str, int], dict[object, list[FinishedJob]]] = {}
    for job in jobs:
        work = job.planned.work
        size = work.parameters and round(log2(work.parameters))
        machine = job.gpus[0] if job.gpus else f"{os.cpu_count()} CPU cores, {platform.machine()}"
        kind = (job.planned.job.rule, work.of, work.kernel, size)
        blocks.setdefault((machine, len(job.gpus)), {}).setdefault(kind, []).append(job)
    command = f"snakemake; its timings of the jobs of results/{run}"
    measured = [
        {"machine": machine, "gpus": gpus, "command": command, "includes": ["start", "tuning"],
         "figures": [*map(_figure, block.values())]}
        for (machine, gpus), block in blocks.items()
    ]  # fmt: skip
    with atomic_write(path, force=True) as temporary:
        temporary.write_text(
            yaml.safe_dump({"measured": measured}, sort_keys=False, default_flow_style=None,
                           width=100)
        )  # fmt: skip


def _figure(jobs: list[FinishedJob]) -> dict[str, object]:
    works, rule = [job.planned.work for job in jobs], jobs[0].planned.job.rule
    figure: dict[str, object] = {"work": rule, "of": works[0].of, "kernel": works[0].kernel}
    for name in ("parameters", "tokens"):
        values = [getattr(work, name) for work in works]
        figure[name] = round(mean(values)) if all(values) else None
    figure["seconds"] = float(f"{mean(job.seconds for job in jobs):.3g}")
    return {key: value for key, value in figure.items() if value}
