"""The Slurm job that a job of the workflow runs in: when it ends, and how it is requeued; and which
pending jobs Slurm will never run.

A job that saves and exits with EXIT_UNFINISHED is requeued by Slurm under the same number, as often
as needed. Snakemake only sees a job that is pending again, and its `retries` are left for failures.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

END = "SLURM_JOB_END_TIME"
EXIT_UNFINISHED = os.EX_TEMPFAIL  # as in training; importing it from there would import torch
WATCH_EVERY = 20  # seconds
COLUMNS = "%i|%T|%r|%P|%l|%k"  # of squeue: id, state, reason, partition, time limit, comment

# Reasons to be pending (`squeue`, %r) that the end of no other job takes away.
FOREVER = re.compile(
    r"Partition(TimeLimit|Config)|BadConstraints|Invalid(Account|QOS)|(Account|QOS)NotAllowed"
    r"|MaxMemPerLimit|DependencyNeverSatisfied"
    r"|(QOS|Assoc)Max\w*Per(Job|Node)\w*|QOSMin\w+|(QOS|Assoc)Grp(?!\w*Run)\w*Minutes\w*"
)
HELD = re.compile(r"JobHeld\w+|JobHoldMaxRequeue|.*requeue.*held.*", re.IGNORECASE)
# Reasons that may end with a running job, or when nodes that are down come back.
MAY_END = re.compile(
    r"(QOS|Assoc)(Grp|Max)\w+|Max\w+PerAccount|PartitionNodeLimit|AccountingPolicy"
)

# Errors of sbatch that a later attempt gets too.
REFUSED = (
    "Invalid partition name", "invalid partition specified", "Invalid account", "Invalid qos",
    "Invalid feature", "Invalid generic resource", "Invalid Trackable RESource", "Invalid --",
    "unrecognized option", "reservation is invalid", "Requested time limit is invalid",
    "node configuration is not available", "Node count specification invalid",
    "CPU count specification invalid", "CPU count per node can not be satisfied",
    "More processors requested than permitted", "Memory required by task is not available",
    "Memory specification can not be satisfied", "not permitted to use this partition",
    "appears to be invalid",  # the plugin itself, of an account
)  # fmt: skip
ADVICE = "`reproduction check --profile PROFILE` says which line of the profile to change. "


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


def refused_for_good(message: str) -> bool:
    """Whether sbatch would refuse this request again, however often it is asked."""
    limits = re.findall(r"\w+", message)  # it names a limit of an account in a line of its own
    return any(words in message for words in REFUSED) or any(map(FOREVER.fullmatch, limits))


def warn_of_jobs_that_never_start(executor: Any, warn: Callable[[str], None]) -> None:
    """Keep asking Slurm why jobs of this run are pending, and warn of those that always will be."""
    plugin = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None or not isinstance(executor, plugin.Executor):
        return

    def watch() -> None:
        known: set[tuple[str, str]] = set()
        while True:
            time.sleep(WATCH_EVERY)
            command = f"squeue --noheader --name={executor.run_uuid} --format={COLUMNS}"
            try:
                queue = subprocess.run(command.split(), capture_output=True, text=True)
            except OSError:
                continue  # squeue cannot be run for now
            # An error of squeue is for the plugin to handle, which asks it too.
            for line in stuck_jobs(queue.stdout, known):
                warn(line)

    threading.Thread(target=watch, name="slurm_watch", daemon=True).start()


def stuck_jobs(queue: str, known: set[tuple[str, str]]) -> Iterator[str]:
    """A line for every rule and reason with jobs that will not start by themselves.

    `queue`: squeue's lines of COLUMNS. `known`: jobs and reasons that had a line before; those of
    now are added.
    """
    jobs = [line.split("|", 5) for line in queue.splitlines() if line.count("|") >= 5]
    any_runs = any(state != "PENDING" for _, state, *_ in jobs)
    waiting: dict[tuple[str, ...], list[str]] = {}
    for number, state, reason, partition, limit, comment in jobs:
        never = FOREVER.fullmatch(reason) or HELD.fullmatch(reason)
        stuck = never or (MAY_END.fullmatch(reason) and not any_runs)
        if stuck and state == "PENDING" and (number, reason) not in known:
            known.add((number, reason))
            rule = comment.removeprefix("rule_").partition("_wildcards_")[0]
            waiting.setdefault((rule, reason, partition, limit), []).append(number)
    for (rule, reason, partition, limit), numbers in waiting.items():
        more = f" and {len(numbers) - 1} more" if numbers[1:] else ""
        which = f"Slurm job {numbers[0]}{more} (rule {rule}; {limit} in partition {partition})"
        if HELD.fullmatch(reason):
            yield f"{which}: held, {reason}. `scontrol release {','.join(numbers)}` lets it start."
        elif FOREVER.fullmatch(reason):
            yield (
                f"{which}: will never start, {reason}. {ADVICE}Then stop this run (Ctrl-C) and "
                "start it again: what is done is kept."
            )
        else:
            yield (
                f"{which}: waits, {reason}, while no job of this run runs. If none of your others "
                f"does, and no node is down, it asks for too much and will never start. {ADVICE}"
            )


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
