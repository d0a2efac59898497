"""After a run: how long its jobs really took, against the plan; and figures for the next one."""

from __future__ import annotations

import csv
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

from keycut.artefact import atomic_write
from keycut.errors import InputError
from keycut.plan.planning import Planned, by_rule, duration, gigabytes, table
from keycut.running.provenance import Provenance


@dataclass(frozen=True)
class Ran:
    """One job that has run."""

    planned: Planned
    seconds: float  # Snakemake's, from the start to the end of its process
    gpus: tuple[str, ...]
    gpu_seconds: float
    disk: int  # bytes of its outputs; of a link, its own
    started: float


SUMS: dict[str, Callable[[Ran], float]] = {
    "planned_s": lambda one: one.planned.cost.seconds,
    "took_s": lambda one: one.seconds,
    "planned_gpu_s": lambda one: one.planned.cost.seconds * one.planned.cost.gpus,
    "took_gpu_s": lambda one: one.gpu_seconds,
    "planned_disk": lambda one: one.planned.work.disk,
    "disk": lambda one: one.disk,
}


def ran(run: str, planned: Iterable[Planned]) -> list[Ran]:
    """The jobs that left a timing and a provenance."""
    found = []
    for one in (one for one in planned if one.job.timing and one.job.outputs):
        timing, outputs = Path(one.job.timing or ""), [Path(path) for path in one.job.outputs]
        record = Provenance.read(outputs[0])
        if record is None or not timing.is_file():
            continue
        with open(timing, newline="") as file:
            seconds = sum(float(row["s"]) for row in csv.DictReader(file, delimiter="\t"))
        gpus = tuple(record.gpus[: ceil(one.job.gpus)])  # it may see more than it asked for
        held = len(gpus) * record.gpu_share
        inside = (file for path in outputs for file in (path, *path.rglob("*")))
        disk = sum(f.lstat().st_size for f in inside if f.is_symlink() or f.is_file())
        started = datetime.fromisoformat(record.started).timestamp()
        found.append(Ran(one, seconds, gpus, seconds * held, disk, started))
    if not found:
        raise InputError(f"no job of {run} has left a timing: there is nothing to look back on")
    return found


def look_back(found: Sequence[Ran]) -> list[dict[str, Any]]:
    """Rule by rule, and in all, what the jobs that have run were planned to take, and took."""
    rules = {**by_rule(found, lambda one: one.planned.job.rule), "total": [*found]}
    return [
        {"rule": rule, "jobs": len(some)} | {key: sum(map(of, some)) for key, of in SUMS.items()}
        for rule, some in rules.items()
    ]


def after_text(run: str, found: Sequence[Ran]) -> str:
    rows = [["rule", "jobs", "planned", "took", "ratio", "GPU time", "took", "disk", "found"]]
    for row in look_back(found):
        planned, took, *gpu = (row[key] for key in [*SUMS][:4])
        times = [duration(planned), duration(took), f"{took / planned:.2f}", *map(duration, gpu)]
        disk = [gigabytes(row["planned_disk"]), gigabytes(row["disk"])]
        rows.append([row["rule"], f"{row['jobs']:,}", *times, *disk])
    wall = max(one.started + one.seconds for one in found) - min(one.started for one in found)
    lines = [f"{run}: planned, and what it took", "", *table(rows), ""]
    return "\n".join([*lines, f"from the first start to the last end: {duration(wall)}"]) + "\n"


def write_figures(path: Path | str, run: str, found: Sequence[Ran]) -> None:
    """What a run measured, in the form of config/costs.yaml: a mean for each kind of work."""
    blocks: dict[tuple[str, int], dict[object, list[Ran]]] = {}
    for one in found:
        work = one.planned.work
        bucket = work.parameters and round(log2(work.parameters))
        machine = one.gpus[0] if one.gpus else f"{os.cpu_count()} CPU cores, {platform.machine()}"
        kind = (one.planned.job.rule, work.of, work.kernel, bucket)
        blocks.setdefault((machine, len(one.gpus)), {}).setdefault(kind, []).append(one)
    command = f"snakemake; its timings of the jobs of results/{run}"
    said = [
        {"machine": machine, "gpus": gpus, "command": command, "includes": ["start", "tuning"],
         "figures": [*map(_figure, block.values())]}
        for (machine, gpus), block in blocks.items()
    ]  # fmt: skip
    text = yaml.safe_dump({"measured": said}, sort_keys=False, default_flow_style=None, width=100)
    with atomic_write(path, force=True) as aside:
        aside.write_text(text)


def _figure(members: list[Ran]) -> dict[str, object]:
    works, rule = [one.planned.work for one in members], members[0].planned.job.rule
    said: dict[str, object] = {"work": rule, "of": works[0].of, "kernel": works[0].kernel}
    for name in ("parameters", "tokens"):
        values = [getattr(work, name) for work in works]
        said[name] = round(mean(values)) if all(values) else None
    said["seconds"] = float(f"{mean(one.seconds for one in members):.3g}")
    return {key: value for key, value in said.items() if value}
