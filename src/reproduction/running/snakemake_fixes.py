"""Snakemake 9.27 and its Slurm plugin 2.8, changed for the length of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def after_planning(workflow: Any, check: Callable[[Any], None]) -> None:
    """Changed: `check` sees the DAG once it is built, in a dry run, too.

    Upstream: none known; `onstart` comes later, and not in a dry run.
    """
    build_dag = workflow._build_dag

    def build_and_check() -> None:
        build_dag()
        check(workflow.dag)

    workflow._build_dag = build_and_check


def drop_job_rate_limit(workflow: Any) -> None:
    """Changed: the scheduler does not limit how many jobs start in a second.

    It does so by a timer for each job, which keeps firing after the job has ended: after some
    hundred jobs that takes a core by itself. To be called when the scheduler exists (`onstart`).
    Upstream: none known. Goes when timers end with their jobs.
    """
    workflow.scheduler.job_rate_limiter = None


def remember_min_job_age() -> None:
    """Changed: the plugin asks the controller only once how long ended jobs stay visible.

    It asks before each look at its jobs, and without an answer takes sacct instead of squeue. On a
    cluster without accounting sacct never answers: the plugin forgets its jobs and waits for ever.
    Upstream: snakemake-executor-plugin-slurm issue 38 is about such clusters, this fallback is not
    known. Goes when a controller that is away for a moment no longer changes the command.
    """
    plugin: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None:
        return
    get_min_job_age, ages = plugin.get_min_job_age, []

    def remembered() -> int | None:
        if not ages and (age := get_min_job_age()) is not None:
            ages.append(age)
        return ages[0] if ages else None

    plugin.get_min_job_age = remembered
