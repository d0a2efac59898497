"""The Slurm job that a job of the workflow runs in: when it ends, and how it is requeued.

A job that saves and exits with EXIT_UNFINISHED is requeued by Slurm under the same number, as often
as needed. Snakemake only sees a job that is pending again, and its `retries` are left for failures.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

END = "SLURM_JOB_END_TIME"
EXIT_UNFINISHED = os.EX_TEMPFAIL  # as in training; importing it from there would import torch


def export_end_time() -> None:
    """Put the end of the Slurm job into the environment, where training looks for it.

    Slurm itself does so only from 23.02 on, and the job step in which Snakemake runs loses it.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or END in os.environ:
        return
    end = _run("squeue", "--noheader", f"--jobs={job}", "--format=%e")
    if end is not None and end.isdecimal():  # there is none where time is not limited
        os.environ[END] = end


@contextmanager
def requeue_at_time_limit(rule: str) -> Iterator[None]:
    """Around the work of a rule: if it is unfinished when its time is up, Slurm queues it again."""
    try:
        yield
    except SystemExit as exit:
        if exit.code == EXIT_UNFINISHED and "SLURM_JOB_ID" in os.environ:
            _requeue(os.environ["SLURM_JOB_ID"], rule)
        raise


def _requeue(job: str, rule: str) -> None:
    state = _run("squeue", "--noheader", f"--jobs={job}", "--format=%T %k")
    # One that does not run has been cancelled, preempted or has no time left, and what becomes of
    # it is decided already. The comment shows that Snakemake submitted it for this rule alone:
    # someone else's job is left alone.
    if state is None or not f"{state}_".startswith(f"RUNNING rule_{rule}_"):
        return
    if _run("scontrol", "requeue", job) is not None:
        logger.info(f"Slurm job {job} goes back into the queue")


def _run(*command: str) -> str | None:
    """What a command of Slurm prints; None, and a warning, if it fails."""
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning(f"{' '.join(command)}: {getattr(error, 'stderr', '') or error}")
        return None
