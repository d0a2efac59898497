"""What ran, where and for how long: Snakemake's timings, and what every job wrote of itself."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from keycut.artefact import read_json
from keycut.reporting.origins import other_code


@dataclass(frozen=True)
class RuleTime:
    """All jobs of one rule. Seconds are Snakemake's, from start to end of each process."""

    name: str
    jobs: int
    seconds: float
    longest: float
    peak_mib: float | None  # resident memory of the largest job
    machines: tuple[str, ...]
    gpus: tuple[str, ...]
    gpu_seconds: float
    other: int  # jobs of other code than there is now


@dataclass(frozen=True)
class Work:
    """A whole run."""

    rules: tuple[RuleTime, ...]
    started: str
    ended: str
    commits: tuple[tuple[str, int], ...]  # and how many jobs ran at each
    versions: tuple[tuple[str, str], ...]  # of packages; several where jobs differ

    @property
    def jobs(self) -> int:
        return sum(rule.jobs for rule in self.rules)

    @property
    def seconds(self) -> float:
        return sum(rule.seconds for rule in self.rules)

    @property
    def gpu_seconds(self) -> float:
        return sum(rule.gpu_seconds for rule in self.rules)


def read_work(
    timings: Mapping[str, Sequence[Path | str]],
    records: Iterable[Path | str],
    now: Mapping[str, str] = {},
) -> Work:
    """From the benchmark files (.tsv) of every rule, and what jobs left beside their outputs.

    Rules stand in the order in which they first ran; `now` is the code of those with a version.
    """
    jobs = sorted((read_json(path) for path in records), key=lambda job: job["started"])
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        by_rule.setdefault(job["rule"], []).append(job)
    names = list(dict.fromkeys([*by_rule, *timings]))
    rules = (_rule(name, timings.get(name, ()), by_rule.get(name, []), now) for name in names)
    ends = [_end(job) for job in jobs]
    return Work(
        rules=tuple(rule for rule in rules if rule.jobs),
        started=jobs[0]["started"] if jobs else "",
        ended=max(ends).strftime("%Y-%m-%dT%H:%M:%SZ") if jobs else "",
        commits=tuple(Counter(job["commit"] or "no git" for job in jobs).items()),
        versions=_versions(jobs),
    )


def _rule(
    name: str,
    timings: Sequence[Path | str],
    jobs: Sequence[Mapping[str, Any]],
    now: Mapping[str, str],
) -> RuleTime:
    rows = [row for path in timings for row in _rows(path)]
    seconds = [float(row["s"]) for row in rows]
    if len(rows) < len(jobs):  # results of a partial run may come without Snakemake's timings
        seconds = [job["seconds"] for job in jobs]
    peaks = [float(row["max_rss"]) for row in rows if row["max_rss"] not in ("-", "NA")]
    peaks += [job["peak_mib"] for job in jobs if "peak_mib" in job]
    return RuleTime(
        name=name,
        jobs=len(seconds),
        seconds=sum(seconds),
        longest=max(seconds, default=0.0),
        peak_mib=max(peaks, default=None),
        machines=tuple(sorted({job["machine"] for job in jobs})),
        gpus=tuple(sorted({gpu for job in jobs for gpu in job["gpus"]})),
        other=sum(other_code(job, now) for job in jobs),
        gpu_seconds=sum(
            job["seconds"] * len(job["gpus"]) * job.get("gpu_share", 1) for job in jobs
        ),
    )


def _rows(path: Path | str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _end(job: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(job["started"]) + timedelta(seconds=job["seconds"])


def _versions(jobs: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    found: dict[str, dict[str, None]] = {}
    for job in jobs:
        for package, version in job["versions"].items():
            found.setdefault(package, {})[version] = None
    return tuple((package, ", ".join(versions)) for package, versions in sorted(found.items()))
