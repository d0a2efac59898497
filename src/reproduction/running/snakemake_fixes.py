"""Snakemake 9.27 and its Slurm plugin 2.8, changed for the length of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from reproduction.running.slurm import ADVICE, refused_for_good

LOG_LINES, LOG_WIDTH = 40, 300  # shown of each log of a failed job: lines, and characters of each


def patch_snakemake(workflow: Any) -> None:
    """All changes; to be called once the scheduler exists (`onstart`)."""
    drop_job_rate_limit(workflow)
    show_ends_of_logs()
    if plugin := sys.modules.get("snakemake_executor_plugin_slurm"):
        remember_min_job_age(plugin)
        fail_refused_jobs(plugin)


def drop_job_rate_limit(workflow: Any) -> None:
    """Changed: the scheduler does not limit how many jobs start in a second.

    It does so by a timer for each job, which keeps firing after the job has ended: after some
    hundred jobs that takes a core by itself.
    Upstream: none known. Goes when timers end with their jobs.
    """
    workflow.scheduler.job_rate_limiter = None


def show_ends_of_logs() -> None:
    """Changed: of a failed job the last lines of every log are shown, the rule's and Slurm's.

    Snakemake stops at the first log that is empty or missing, as the rule's is when the disk is
    full or the job did not get as far as its script. And it shows all of Slurm's, where command
    lines of thousands of characters stand between a user and the reason.
    Upstream: none known. Goes when Snakemake shows every log, and can limit the lines.
    """
    logging = sys.modules["snakemake.logging"]
    show_logs = logging.show_logs

    def show_ends(logs: Iterable[str]) -> Iterator[str]:
        for log in logs:
            head, *lines = show_logs([log])
            yield head
            yield from (line[:LOG_WIDTH] for line in lines[-LOG_LINES:])

    logging.show_logs = show_ends  # type: ignore[attr-defined]


def remember_min_job_age(plugin: Any) -> None:
    """Changed: the plugin asks the controller only once how long ended jobs stay visible.

    It asks before each look at its jobs, and without an answer takes sacct instead of squeue. On a
    cluster without accounting sacct never answers: the plugin forgets its jobs and waits for ever.
    Upstream: snakemake-executor-plugin-slurm issue 38 is about such clusters, this fallback is not
    known. Goes when a controller that is away for a moment no longer changes the command.
    """
    get_min_job_age = plugin.get_min_job_age
    ages: list[int] = []

    def remembered() -> int | None:
        if not ages and (age := get_min_job_age()) is not None:
            ages.append(age)
        return ages[0] if ages else None

    plugin.get_min_job_age = remembered


def fail_refused_jobs(plugin: Any) -> None:
    """Changed: a job that Slurm would refuse again is not submitted again.

    A refused submission counts as a failed job, and `retries` submits it with more memory and time.
    Upstream: snakemake-executor-plugin-slurm issue 320 asked for these retries. Goes when the
    plugin tells a request that cannot be met from a controller that is busy.
    """
    report = plugin.Executor._report_job_error_threadsafe  # of submissions alone

    def report_final(executor: Any, info: Any, message: str) -> None:
        # What sbatch says and how it was called, without the kilobytes that the job would run.
        message = message.partition(" --wrap=")[0]
        if refused_for_good(message):
            # Not its `attempt`: that evaluates the resources anew, and the scheduler gets back
            # what the job holds.
            info.job._attempt = info.job.restart_times + 1
            message += f"\n    It is not tried again: Slurm would refuse it again. {ADVICE}"
        report(executor, info, f"{message}\n")

    plugin.Executor._report_job_error_threadsafe = report_final
