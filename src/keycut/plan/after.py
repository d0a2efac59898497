"""After a run: how long its jobs really took, against the plan; and figures for the next one."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil, log2
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from keycut.artefact import read_json, whole
from keycut.errors import InputError
from keycut.layout import BESIDE
from keycut.plan.planning import Planned, by_rule, digits, duration, size, table


@dataclass(frozen=True)
class Ran:
    """One job that has run."""

    planned: Planned
    seconds: float  # Snakemake's, from the start to the end of its process
    gpus: tuple[str, ...]
    gpu_seconds: float
    disk: int  # bytes of its outputs; of a link, its own
    started: float | None


def ran(run: str, planned: Iterable[Planned]) -> list[Ran]:
    """The jobs that left a timing."""
    found = []
    for one in planned:
        job = one.job
        if not (job.timing and Path(job.timing).is_file()):
            continue
        with open(job.timing, newline="") as file:
            seconds = sum(float(row["s"]) for row in csv.DictReader(file, delimiter="\t"))
        beside = Path(f"{job.outputs[0]}{BESIDE}")
        record = read_json(beside) if beside.is_file() else {"gpus": [], "started": None}
        gpus = tuple(record["gpus"][: ceil(job.gpus)])  # it may see more than it asked for
        held = len(gpus) * record.get("gpu_share", 1.0)
        inside = (file for path in map(Path, job.outputs) for file in (path, *path.rglob("*")))
        disk = sum(f.lstat().st_size for f in inside if f.is_symlink() or f.is_file())
        started = record["started"] and datetime.fromisoformat(record["started"]).timestamp()
        found.append(Ran(one, seconds, gpus, seconds * held, disk, started))
    if not found:
        raise InputError(f"no job of {run} has left a timing: there is nothing to look back on")
    return found


def look_back(found: Sequence[Ran]) -> list[dict[str, Any]]:
    """Rule by rule, and in all, what the jobs that have run were planned to take, and took."""
    rows = []
    rules = by_rule(found, lambda one: one.planned.job.rule)
    for rule, some in {**rules, "total": list(found)}.items():
        costs = [one.planned.cost for one in some]
        row = {
            "planned_s": sum(cost.seconds for cost in costs),
            "took_s": sum(one.seconds for one in some),
            "planned_gpu_s": sum(cost.seconds * cost.gpus for cost in costs),
            "took_gpu_s": sum(one.gpu_seconds for one in some),
            "planned_disk": sum(one.planned.work.disk for one in some),
            "disk": sum(one.disk for one in some),
        }
        row["ratio"] = row["took_s"] / row["planned_s"]
        rows.append({"rule": rule, "jobs": len(some), **row})
    return rows


def after_text(run: str, found: Sequence[Ran]) -> str:
    rows = [["rule", "jobs", "planned", "took", "ratio", "GPU hours", "took", "disk", "found"]]
    for row in look_back(found):
        times = [duration(row["planned_s"]), duration(row["took_s"]), f"{row['ratio']:.2f}"]
        hours = [digits(row[key] / 3600) for key in ("planned_gpu_s", "took_gpu_s")]
        disk = [size(row["planned_disk"]), size(row["disk"])]
        rows.append([row["rule"], f"{row['jobs']:,}", *times, *hours, *disk])
    lines = [f"{run}: planned, and what it took", "", *table(rows)]
    if dated := [(one.started, one.started + one.seconds) for one in found if one.started]:
        wall = max(end for _, end in dated) - min(start for start, _ in dated)
        lines += ["", f"from the first start to the last end: {duration(wall)}"]
    return "\n".join(lines) + "\n"


def write_figures(path: Path | str, run: str, found: Sequence[Ran]) -> None:
    """What a run measured, in the form of config/costs.yaml: a mean for each kind of work."""
    blocks: dict[tuple[str, int], dict[object, list[Ran]]] = {}
    for one in found:
        work = one.planned.work
        bucket = round(log2(work.parameters)) if work.parameters else None
        machine = one.gpus[0] if one.gpus else f"{os.cpu_count()} CPU cores, {platform.machine()}"
        kind = (one.planned.job.rule, work.of, work.kernel, bucket)
        blocks.setdefault((machine, len(one.gpus)), {}).setdefault(kind, []).append(one)
    measured = [
        {
            "machine": machine,
            "gpus": gpus,
            "command": f"snakemake; its timings of the jobs of results/{run}",
            "includes": ["start", "tuning"],
            "figures": [_figure(members) for members in block.values()],
        }
        for (machine, gpus), block in blocks.items()
    ]
    with whole(path, force=True) as aside:
        said = {"measured": measured}
        aside.write_text(yaml.safe_dump(said, sort_keys=False, default_flow_style=None, width=100))


def _figure(members: list[Ran]) -> dict[str, object]:
    work = members[0].planned.work
    said: dict[str, object] = {"work": members[0].planned.job.rule, "of": work.of}
    said["kernel"] = work.kernel
    for name in ("parameters", "tokens"):
        values = [getattr(one.planned.work, name) for one in members]
        said[name] = round(mean(values)) if all(values) else None
    said["seconds"] = float(f"{mean(one.seconds for one in members):.3g}")
    return {key: value for key, value in said.items() if value}
