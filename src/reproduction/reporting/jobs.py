"""Which jobs made the results, where and for how long: from the records beside their outputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from reproduction.running.provenance import PROVENANCE
from statecut.files import read_json

RENDERING = frozenset(("table", "figure", "document", "verdict", "page", "archive"))
"""Rules that show results. They are no part of what the results took, and left out, a page that is
written again from the same results is the same."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RuleSummary:
    """Some jobs, together. Seconds are from start to end of each process."""

    name: str
    jobs: int
    seconds: float
    longest: float
    peak_mib: float  # resident memory of the largest job; 0 if not known
    where: tuple[str, ...]  # machines and GPUs
    gpu_seconds: float

    @classmethod
    def of(cls, name: str, jobs: Iterable[Record]) -> RuleSummary:
        jobs = list(jobs)
        machines, gpus = (
            {job["machine"] for job in jobs},
            {gpu for job in jobs for gpu in job["gpus"]},
        )
        return cls(
            name,
            jobs=len(jobs),
            seconds=sum(job["seconds"] for job in jobs),
            longest=max((job["seconds"] for job in jobs), default=0.0),
            peak_mib=max((job.get("peak_mib", 0) for job in jobs), default=0),
            where=(*sorted(machines), *sorted(gpus)),
            gpu_seconds=sum(
                job["seconds"] * len(job["gpus"]) * job.get("gpu_share", 1) for job in jobs
            ),
        )


@dataclass(frozen=True)
class RunSummary:
    rules: list[RuleSummary]  # in the order in which they first ran
    all: RuleSummary
    started: str
    ended: str
    commits: dict[str, int]  # and how many jobs ran at each
    versions: dict[str, list[str]]  # of packages


def result_records(results: Path) -> dict[Path, Record]:
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


def summarize_jobs(records: Iterable[Record]) -> RunSummary:
    jobs = sorted(records, key=lambda job: job["started"])
    by_rule: dict[str, list[Record]] = {}
    versions: dict[str, dict[str, None]] = {}
    for job in jobs:
        by_rule.setdefault(job["rule"], []).append(job)
        for package, version in job["versions"].items():
            versions.setdefault(package, {})[version] = None
    ends = [
        datetime.fromisoformat(job["started"]) + timedelta(seconds=job["seconds"]) for job in jobs
    ]
    return RunSummary(
        [RuleSummary.of(*rule) for rule in by_rule.items()],
        RuleSummary.of("all", jobs),
        started=jobs[0]["started"] if jobs else "",
        ended=max(ends).strftime("%Y-%m-%dT%H:%M:%SZ") if jobs else "",
        commits=dict(Counter(job["commit"] or "no git" for job in jobs)),
        versions={package: [*names] for package, names in sorted(versions.items())},
    )
