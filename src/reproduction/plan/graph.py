"""The jobs of a run, as Snakemake's own dry run has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from reproduction.config import Config
from reproduction.running.dag import build_dag, parse_arguments


@dataclass(frozen=True)
class DagJob:
    """One job of the DAG."""

    rule: str
    wildcards: Mapping[str, str]
    outputs: tuple[str, ...]
    timing: str | None  # where Snakemake writes how long it took
    after: tuple[int, ...]  # places of jobs that must end before it starts
    gpus: float  # less than one where a profile cuts them into shares
    cores: int
    memory_mb: int | None
    limit_s: float | None  # what the rule or the profile allows it
    runs: bool  # False for a target rule, which only gathers files
    wanted: bool  # whether it is still to run


@dataclass(frozen=True)
class Graph:
    """All jobs, each after those that it needs, and what the profile says of the machine."""

    config: Config
    jobs: tuple[DagJob, ...]
    missing: tuple[str, ...]  # files that no rule makes and that are not there yet
    gpus: float | None
    cores: int | None


def read_graph(
    targets: Sequence[str] = (),
    *,
    configfile: Path | str | None = None,
    profile: str | None = None,
) -> Graph:
    """The jobs behind these targets (by default, all), without running any.

    The working directory is the checkout. The default configuration is the one that the profile
    names, or else the workflow's own.
    """
    arguments = parse_arguments(profile, configfile)
    with build_dag(arguments, targets) as built:
        jobs = tuple(_jobs(built.dag))
        shares = max(map(_shares, built.dag.jobs), default=1)
    gpus = arguments.resources.get("gpu")
    machine_gpus = gpus.value / shares if gpus and gpus.value else None
    return Graph(built.config, jobs, built.missing, machine_gpus, arguments.cores)


def _jobs(dag: Any) -> Iterator[DagJob]:
    order = TopologicalSorter({job: list(dag.job_dependencies(job)) for job in dag.jobs})
    places: dict[Any, int] = {}
    for place, job in enumerate(order.static_order()):
        places[job] = place
        gpus = int(job.resources.get("gpu", 0)) / _shares(job)
        # The cores that come with its GPUs, where the profile says how many.
        cpus_per_gpu = int(job.resources.get("cpus_per_gpu", 0))
        runtime = job.resources.get("runtime")
        yield DagJob(
            rule=job.rule.name,
            wildcards=dict(job.wildcards.items()),
            outputs=tuple(map(str, job.output)),
            timing=str(job.benchmark) if job.benchmark else None,
            after=tuple(sorted(places[needed] for needed in dag.job_dependencies(job))),
            gpus=gpus,
            cores=int(gpus * cpus_per_gpu) or int(job.threads),
            memory_mb=job.resources.get("mem_mb"),
            limit_s=60.0 * runtime if runtime is not None else None,
            runs=not job.rule.norun,
            wanted=dag.needrun(job),
        )


def _shares(job: Any) -> int:
    """What the profile cuts a GPU into."""
    return int(job.resources.get("gpu_shares", 1))
