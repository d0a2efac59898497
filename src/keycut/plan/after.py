"""After a run: how long its jobs really took, against the plan; and figures for the next one."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from math import ceil, log2
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from keycut.artefact import read_json, whole
from keycut.errors import InputError
from keycut.layout import BESIDE
from keycut.plan.costs import EXTRAS
from keycut.plan.planning import Planned, by_rule
from keycut.plan.words import at_least, duration, size, table


@dataclass(frozen=True)
class Ran:
    """One job that has run."""

    planned: Planned
    seconds: float  # Snakemake's, from the start to the end of its process
    gpus: tuple[str, ...]
    gpu_share: float  # of each of them
    disk: int  # bytes of its outputs
    started: datetime | None

    @property
    def ended(self) -> datetime | None:
        return self.started and self.started + timedelta(seconds=self.seconds)


@dataclass(frozen=True)
class RuleAfter:
    """All jobs of one rule that have run, planned and real."""

    rule: str
    jobs: int
    planned_s: float
    complete: bool  # whether all of it was measured before
    took_s: float
    planned_gpu_s: float
    took_gpu_s: float
    planned_disk: int
    disk: int

    @property
    def ratio(self) -> float | None:
        return self.took_s / self.planned_s if self.complete and self.planned_s else None


@dataclass(frozen=True)
class After:
    run: str
    rules: tuple[RuleAfter, ...]
    wall_s: float | None  # from the first start to the last end, pauses included

    @property
    def ratio(self) -> float | None:
        """Of all rules that had a plan."""
        known = [rule for rule in self.rules if rule.ratio is not None]
        planned = sum(rule.planned_s for rule in known)
        return sum(rule.took_s for rule in known) / planned if planned else None

    def as_json(self) -> dict[str, Any]:
        rules = [{**asdict(rule), "ratio": rule.ratio} for rule in self.rules]
        return {"run": self.run, "rules": rules, "wall_s": self.wall_s, "ratio": self.ratio}


def ran(run: str, planned: Iterable[Planned]) -> list[Ran]:
    """The jobs that left a timing."""
    found = [
        _ran(one, Path(one.job.timing))
        for one in planned
        if one.job.timing and Path(one.job.timing).is_file()
    ]
    if not found:
        raise InputError(f"no job of {run} has left a timing: there is nothing to look back on")
    return found


def look_back(run: str, found: Sequence[Ran]) -> After:
    """What the jobs that have run were planned to take, and took."""
    rules = []
    for rule, real in by_rule(found, lambda one: one.planned.job.rule).items():
        members = [one.planned for one in real]
        rules.append(
            RuleAfter(
                rule=rule,
                jobs=len(real),
                planned_s=sum(one.cost.seconds for one in members),
                complete=not any(one.cost.missing for one in members),
                took_s=sum(one.seconds for one in real),
                planned_gpu_s=sum(one.cost.seconds * one.cost.gpus for one in members),
                took_gpu_s=sum(one.seconds * len(one.gpus) * one.gpu_share for one in real),
                planned_disk=sum(one.work.disk for one in members),
                disk=sum(one.disk for one in real),
            )
        )
    starts = [one.started for one in found if one.started]
    ends = [one.ended for one in found if one.ended]
    wall = (max(ends) - min(starts)).total_seconds() if starts else None
    return After(run, tuple(rules), wall)


def _ran(planned: Planned, timing: Path) -> Ran:
    with open(timing, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    job = planned.job
    gpus: tuple[str, ...] = ()
    share = 1.0
    started = None
    if job.outputs and (beside := Path(f"{job.outputs[0]}{BESIDE}")).is_file():
        record = read_json(beside)
        # A job may see more GPUs than it asked for.
        gpus = tuple(record["gpus"][: ceil(job.gpus)])
        share = record.get("gpu_share", 1.0)
        started = datetime.fromisoformat(record["started"])
    return Ran(
        planned=planned,
        seconds=sum(float(row["s"]) for row in rows),
        gpus=gpus,
        gpu_share=share,
        disk=sum(map(_size, map(Path, job.outputs))),
        started=started,
    )


def _size(path: Path) -> int:
    """Bytes of a file or folder; of a link, its own."""
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(one.lstat().st_size for one in inside if one.is_symlink() or one.is_file())


def after_text(after: After) -> str:
    rows = [["rule", "jobs", "planned", "took", "ratio", "GPU time", "took", "disk", "found"]]
    for rule in after.rules:
        planned = at_least(duration(rule.planned_s), rule.complete)
        gpu = at_least(duration(rule.planned_gpu_s), rule.complete)
        rows.append(
            [
                rule.rule,
                f"{rule.jobs:,}",
                planned if rule.complete or rule.planned_s else "not measured",
                duration(rule.took_s),
                _ratio(rule.ratio),
                gpu if rule.planned_gpu_s or rule.took_gpu_s else "",
                duration(rule.took_gpu_s) if rule.took_gpu_s else "",
                size(rule.planned_disk) if rule.planned_disk else "",
                size(rule.disk),
            ]
        )
    complete = all(rule.complete for rule in after.rules)
    planned_gpu = sum(rule.planned_gpu_s for rule in after.rules)
    took_gpu = sum(rule.took_gpu_s for rule in after.rules)
    rows.append(
        [
            "total",
            f"{sum(rule.jobs for rule in after.rules):,}",
            at_least(duration(sum(rule.planned_s for rule in after.rules)), complete),
            duration(sum(rule.took_s for rule in after.rules)),
            _ratio(after.ratio),
            at_least(duration(planned_gpu), complete) if planned_gpu or took_gpu else "",
            duration(took_gpu) if took_gpu else "",
            size(sum(rule.planned_disk for rule in after.rules)),
            size(sum(rule.disk for rule in after.rules)),
        ]
    )
    lines = [f"{after.run}: planned, and what it took", "", *table(rows), ""]
    if after.wall_s is not None:
        lines.append(f"from the first start to the last end: {duration(after.wall_s)}")
    if after.ratio is not None:
        lines.append("the ratio of the total is of the rules that were measured before")
    return "\n".join(lines) + "\n"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def write_figures(path: Path | str, run: str, found: Sequence[Ran]) -> None:
    """What a run measured, in the form of config/costs.yaml: a mean for each kind of work."""
    blocks: dict[tuple[str, int], dict[tuple[object, ...], list[Ran]]] = {}
    for one in found:
        work = one.planned.work
        bucket = round(log2(work.parameters)) if work.parameters else None
        machine = one.gpus[0] if one.gpus else f"{os.cpu_count()} CPU cores, {platform.machine()}"
        kind = (one.planned.job.rule, "+".join(work.of), work.kernel or "", bucket)
        block = blocks.setdefault((machine, len(one.gpus)), {})
        block.setdefault(kind, []).append(one)
    measured = [
        {
            "machine": machine,
            "gpus": gpus,
            "command": f"snakemake; its timings of the jobs of results/{run}",
            "includes": list(EXTRAS),
            "figures": [_figure(members) for members in block.values()],
        }
        for (machine, gpus), block in blocks.items()
    ]
    with whole(path, force=True) as aside:
        aside.write_text(
            yaml.safe_dump(
                {"measured": measured}, sort_keys=False, default_flow_style=None, width=100
            )
        )


def _figure(members: Sequence[Ran]) -> dict[str, object]:
    work = members[0].planned.work
    means = {
        name: round(mean(values))
        for name in ("parameters", "tokens")
        if all(values := [getattr(one.planned.work, name) for one in members])
    }
    said = {
        "work": members[0].planned.job.rule,
        "of": "+".join(work.of),
        "kernel": work.kernel,
        **means,
        "seconds": float(f"{mean(one.seconds for one in members):.3g}"),
    }
    return {key: value for key, value in said.items() if value}
