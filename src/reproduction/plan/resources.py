"""What each rule asks of the scheduler, as a table:
python -m reproduction.plan.resources PROFILE"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from reproduction.plan.graph import DagJob, read_graph
from reproduction.plan.planning import by_rule


def resource_table(jobs: Sequence[DagJob]) -> str:
    """A row per rule, in Markdown, those with most GPUs first."""
    rules = by_rule((job for job in jobs if job.runs), lambda job: job.rule)
    lines = [
        "| rule | jobs | GPUs | cores | memory, GB | time, hours |",
        "|---|---|---|---|---|---|",
    ]
    for rule, some in sorted(rules.items(), key=lambda item: (-item[1][0].gpus, item[0])):
        columns: tuple[list[float], ...] = (
            [job.gpus for job in some],
            [job.cores for job in some],
            [(job.memory_mb or 0) / 1000 for job in some],
            [(job.limit_s or 0) / 3600 for job in some],
        )
        lines.append(f"| {rule} | {len(some)} | {' | '.join(map(_range, columns))} |")
    return "\n".join(lines) + "\n"


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


if __name__ == "__main__":
    sys.stdout.write(resource_table(read_graph(profile=sys.argv[1]).jobs))
