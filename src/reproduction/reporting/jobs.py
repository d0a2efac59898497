"""Which jobs ran, where and for how long: from their timings and their provenance."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from reproduction.running.provenance import PROVENANCE
from statecut.files import read_json

RENDERING = frozenset(
    ("frame", "union", "table", "figure", "document", "pdf", "verdict", "page", "archive")
)
"""Rules that show results. They are no part of what the results took, and left out, a page that is
written again from the same results is the same."""


@dataclass(frozen=True)
class RuleSummary:
    """All jobs of one rule. Seconds are from start to end of each process."""

    name: str
    jobs: int
    seconds: float
    longest: float
    peak_mib: float | None  # resident memory of the largest job
    machines: tuple[str, ...]
    gpus: tuple[str, ...]
    gpu_seconds: float


@dataclass(frozen=True)
class RunSummary:
    rules: tuple[RuleSummary, ...]
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


def result_records(results: Path) -> dict[Path, dict[str, Any]]:
    """What the jobs that made the results wrote about themselves, by file (.provenance.json).

    Jobs that show them may run meanwhile: their records come and go, in hidden folders first.
    """
    paths, records = [], {}
    for folder, folders, files in os.walk(results):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder, name) for name in files if name.endswith(PROVENANCE)]
    for path in sorted(paths):
        # One that was removed since it was listed: its job is about to run again.
        with suppress(FileNotFoundError):
            records[path] = read_json(path)
    return {path: record for path, record in records.items() if record["rule"] not in RENDERING}


def summarize_jobs(
    timings: Mapping[str, Sequence[Path | str]],
    records: Iterable[Mapping[str, Any]],
) -> RunSummary:
    """What made the results: from timings of rules (.tsv) and the records of `result_records`.

    Rules are in the order in which they first ran.
    """
    jobs = sorted(records, key=lambda job: job["started"])
    by_rule: dict[str, list[Mapping[str, Any]]] = {}
    versions: dict[str, dict[str, None]] = {}
    for job in jobs:
        by_rule.setdefault(job["rule"], []).append(job)
        for package, version in job["versions"].items():
            versions.setdefault(package, {})[version] = None
    rules = [
        _summarize_rule(name, timings.get(name, ()), by_rule.get(name, []))
        for name in dict.fromkeys([*by_rule, *timings])
        if name not in RENDERING
    ]
    ends = [
        datetime.fromisoformat(job["started"]) + timedelta(seconds=job["seconds"]) for job in jobs
    ]
    return RunSummary(
        rules=tuple(rule for rule in rules if rule.jobs),
        started=jobs[0]["started"] if jobs else "",
        ended=max(ends).strftime("%Y-%m-%dT%H:%M:%SZ") if jobs else "",
        commits=tuple(Counter(job["commit"] or "no git" for job in jobs).items()),
        versions=tuple((package, ", ".join(names)) for package, names in sorted(versions.items())),
    )


def read_timing(path: Path | str) -> list[dict[str, str]]:
    """The lines of what Snakemake's `benchmark` writes about a job. With `benchmark-extended` the
    job's parameters are among them, longer than csv takes a field to be."""
    csv.field_size_limit(2**31 - 1)
    with open(path, newline="") as file:
        return [*csv.DictReader(file, delimiter="\t")]


def _summarize_rule(
    name: str,
    timings: Sequence[Path | str],
    jobs: Sequence[Mapping[str, Any]],
) -> RuleSummary:
    rows = [row for path in timings for row in read_timing(path)]
    seconds = [float(row["s"]) for row in rows]
    if len(rows) < len(jobs):  # results of a partial run may come without timings
        seconds = [job["seconds"] for job in jobs]
    peaks = [float(row["max_rss"]) for row in rows if row["max_rss"] not in ("-", "NA")]
    peaks += [job["peak_mib"] for job in jobs if "peak_mib" in job]
    return RuleSummary(
        name=name,
        jobs=len(seconds),
        seconds=sum(seconds),
        longest=max(seconds, default=0.0),
        peak_mib=max(peaks, default=None),
        machines=tuple(sorted({job["machine"] for job in jobs})),
        gpus=tuple(sorted({gpu for job in jobs for gpu in job["gpus"]})),
        gpu_seconds=sum(
            job["seconds"] * len(job["gpus"]) * job.get("gpu_share", 1) for job in jobs
        ),
    )
