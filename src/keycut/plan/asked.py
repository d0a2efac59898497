"""What each rule asks of the scheduler, as a table:  python -m keycut.plan.asked PROFILE"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from keycut.plan.graph import DagJob, read_graph


def asked_table(jobs: Sequence[DagJob]) -> str:
    """A row per rule, in Markdown, those with most GPUs first."""
    rules: dict[str, list[DagJob]] = {}
    for job in (job for job in jobs if job.runs):
        rules.setdefault(job.rule, []).append(job)
    lines = [
        "| rule | jobs | GPUs | cores | memory, GB | time, hours |",
        "|---|---|---|---|---|---|",
    ]
    for rule, some in sorted(rules.items(), key=lambda one: (-one[1][0].gpus, one[0])):
        asked = zip(
            *((o.gpus, o.cores, (o.memory_mb or 0) / 1000, (o.limit_s or 0) / 3600) for o in some),
            strict=True,
        )
        lines.append(f"| {rule} | {len(some)} | {' | '.join(map(_range, asked))} |")
    return "\n".join(lines) + "\n"


def _range(values: Iterable[float]) -> str:
    found = sorted(set(values))
    return " to ".join(f"{value:.3g}" for value in found[:1] + found[1:][-1:])


if __name__ == "__main__":
    sys.stdout.write(asked_table(read_graph(profile=sys.argv[1]).jobs))
