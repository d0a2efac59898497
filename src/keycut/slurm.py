"""What a job of the workflow has to know of the Slurm job that it runs in: when it ends, and how
to go on after that.

A run that saves and leaves with GO_ON_LATER goes back into Slurm's queue as the same job, so that
it takes as many stretches as it needs: Snakemake only sees a job that waits again. Its `retries`
are left for what really failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

END = "SLURM_JOB_END_TIME"
SHOWN, WIDTH = 40, 300  # lines of each log of a job that failed, and characters of each line
GO_ON_LATER = os.EX_TEMPFAIL  # as training leaves; importing it from there would import torch


def note_end() -> None:
    """Put the end of the Slurm job into the environment, where training looks for it.

    Slurm itself does so only from 23.02 on, and the step in which Snakemake runs a job loses it.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or END in os.environ:
        return
    end = _asked("squeue", "--noheader", f"--jobs={job}", "--format=%e")
    if end is not None and end.isdecimal():  # there is none where time is not limited
        os.environ[END] = end


def keep_asking_squeue() -> None:
    """Keep Snakemake's plugin from turning to sacct while the controller does not answer.

    Before each look at its jobs the plugin asks the controller how long ended jobs stay visible,
    and without an answer takes sacct. Where there is no accounting that never answers either, and
    the plugin then forgets its jobs and waits for ever. One answer is enough.
    """
    plugin = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None:
        return
    ask = plugin.get_min_job_age
    known: list[int] = []

    def remembered() -> int | None:
        if not known and (age := ask()) is not None:
            known.append(age)
        return known[0] if known else None

    plugin.get_min_job_age = remembered  # type: ignore[attr-defined]


def show_the_ends_of_logs() -> None:
    """Let Snakemake show the end of every log of a job that failed: the rule's and Slurm's.

    By itself it stops at the first that is empty or missing, as the rule's is when the disk is full
    or the job did not get as far as its script; and it shows the whole of Slurm's, where its own
    command lines of some thousand characters stand between a user and the reason.
    """
    logging = sys.modules["snakemake.logging"]
    show = logging.show_logs

    def ends(logs: Iterable[str]) -> Iterator[str]:
        for log in logs:
            head, *lines = show([log])
            yield head
            yield from (line[:WIDTH] for line in lines[-SHOWN:])

    logging.show_logs = ends  # type: ignore[attr-defined]


@contextmanager
def goes_on_later(rule: str) -> Iterator[None]:
    """Around the work of a rule: if it is to go on later, Slurm queues the same job again."""
    try:
        yield
    except SystemExit as left:
        if left.code == GO_ON_LATER and "SLURM_JOB_ID" in os.environ:
            _queue_again(os.environ["SLURM_JOB_ID"], rule)
        raise


def _queue_again(job: str, rule: str) -> None:
    found = _asked("squeue", "--noheader", f"--jobs={job}", "--format=%T %k")
    # Only a job that runs is ours to queue. One that Slurm is ending has been cancelled, preempted
    # or has no time left, and what becomes of it is decided already. The comment tells that
    # Snakemake submitted it for this rule alone: someone else's job is left alone.
    if found is None or not f"{found}_".startswith(f"RUNNING rule_{rule}_"):
        return
    if _asked("scontrol", "requeue", job) is not None:
        print(f"keycut: Slurm job {job} goes back into the queue", file=sys.stderr, flush=True)


def _asked(*command: str) -> str | None:
    """What a command of Slurm answers; None, and its words on stderr, if it does not."""
    try:
        done = subprocess.run(
            command, env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except OSError as error:
        print(f"keycut: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return None
    except subprocess.CalledProcessError as error:
        print(f"keycut: {' '.join(command)}: {error.stderr.strip()}", file=sys.stderr, flush=True)
        return None
    return done.stdout.strip()
