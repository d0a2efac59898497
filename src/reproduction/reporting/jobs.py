"""Which jobs made the results, where and for how long: from the records beside their outputs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.running.provenance import PROVENANCE

RENDERING = frozenset(("table", "figure", "document", "pdf", "verdict", "page", "archive"))
"""Rules that show results. They are no part of what the results took, and left out, a page that is
written again from the same results is the same."""

Record = Mapping[str, Any]


def result_records(results: Path, *, left_out: frozenset[str] = RENDERING) -> dict[Path, Record]:
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
            records[path] = json.loads(path.read_text())
    return {path: record for path, record in records.items() if record["rule"] not in left_out}


class Work(NamedTuple):
    """Some jobs, together. Seconds are from start to end of each process."""

    name: str
    jobs: int
    seconds: float
    longest: float
    peak_mib: float  # resident memory of the largest job; 0 if not known
    gpu_seconds: float
    where: list[str]  # machines and GPUs


def summarize(name: str, jobs: Iterable[Record]) -> Work:
    jobs = list(jobs)
    seconds = [job["seconds"] for job in jobs]
    gpus = [len(job["gpus"]) * job.get("gpu_share", 1) for job in jobs]
    return Work(
        name,
        len(jobs),
        sum(seconds),
        max(seconds, default=0.0),
        max((job.get("peak_mib", 0) for job in jobs), default=0),
        sum(s * g for s, g in zip(seconds, gpus, strict=True)),
        [*sorted({job["machine"] for job in jobs}), *sorted({g for j in jobs for g in j["gpus"]})],
    )


def subject_of(record: Record) -> str:
    """The model that a job worked on, with the suite or benchmark; "" for other jobs."""
    wildcards = record["wildcards"]
    model = wildcards.get("model") or wildcards.get("subject", "/").split("/")[1]
    model = model or wildcards.get("measured", "").rsplit("-", 2)[0]
    return " ".join(filter(None, (model, wildcards.get("suite") or wildcards.get("benchmark"))))


def used_and_asked(records: Iterable[Record]) -> list[list[str]]:
    """By rule and model: seconds and memory of the jobs, next to what was asked for. Of
    several processes in one job, memory is the largest one's."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for job in sorted(records, key=lambda job: job["started"]):
        groups.setdefault((job["rule"], subject_of(job)), []).append(job)
    rows = [["rule", "model", "jobs", "seconds", "longest", "asked", "GB", "asked", "GPU GB"]]
    for names, jobs in groups.items():
        work = summarize("", jobs)
        asked = {
            name: max(job.get("asked", {}).get(name) or 0 for job in jobs)
            for name in ("runtime", "mem_mb")
        }
        seconds = [work.seconds / work.jobs, work.longest, 60 * asked["runtime"]]
        on_gpu = max(job.get("gpu_peak_mib", 0) for job in jobs)
        memory = [work.peak_mib * 2**20, 1e6 * asked["mem_mb"], on_gpu * 2**20]
        cells = [f"{second:,.0f}" * (second > 0) for second in seconds]
        cells += [f"{size / 1e9:.1f}" * (size > 0) for size in memory]
        rows.append([*names, str(work.jobs), *cells])
    return rows


def summarize_jobs(records: Iterable[Record]) -> dict[str, Any]:
    """What a page says of all jobs: by rule, in the order in which they first ran; when, and with
    which software."""
    jobs = sorted(records, key=lambda job: job["started"])
    by_rule: dict[str, list[Record]] = {}
    versions: dict[str, dict[str, None]] = {}
    for job in jobs:
        by_rule.setdefault(job["rule"], []).append(job)
        for package, version in job["versions"].items():
            versions.setdefault(package, {})[version] = None
    ends = (datetime.fromisoformat(j["started"]) + timedelta(seconds=j["seconds"]) for j in jobs)
    return {
        "rules": [summarize(*rule) for rule in by_rule.items()],
        "all": summarize("all", jobs),
        "started": jobs[0]["started"] if jobs else "",
        "ended": max(ends).strftime("%Y-%m-%dT%H:%M:%SZ") if jobs else "",
        "commits": Counter(job["commit"] or "no git" for job in jobs),
        "versions": {package: [*names] for package, names in sorted(versions.items())},
    }
