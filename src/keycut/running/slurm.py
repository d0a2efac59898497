"""What a job of the workflow has to know of the Slurm job that it runs in: when it ends, and how
to go on after that; and what Snakemake is to say of jobs that Slurm will never run.

A job that saves and exits with EXIT_UNFINISHED is requeued by Slurm under the same number, as often
as needed. Snakemake only sees a job that is pending again, and its `retries` are left for failures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

END = "SLURM_JOB_END_TIME"
SHOWN, WIDTH = 40, 300  # lines of each log of a job that failed, and characters of each line
EXIT_UNFINISHED = os.EX_TEMPFAIL  # as training leaves; importing it from there would import torch
RESUMED = ("pretrain", "recover")  # rules that leave so, and are queued again
WATCH_EVERY = 20  # seconds
COLUMNS = "%i|%T|%r|%P|%l|%k"  # of squeue: id, state, reason, partition, time limit, comment

# Reasons to wait (`squeue`, %r) that no other job's end takes away.
FOREVER = re.compile(
    r"Partition(TimeLimit|Config)|BadConstraints|Invalid(Account|QOS)|(Account|QOS)NotAllowed"
    r"|MaxMemPerLimit|DependencyNeverSatisfied"
    r"|(QOS|Assoc)Max\w*Per(Job|Node)\w*|QOSMin\w+|(QOS|Assoc)Grp(?!\w*Run)\w*Minutes\w*"
)
HELD = re.compile(r"JobHeld\w+|JobHoldMaxRequeue|.*requeue.*held.*", re.IGNORECASE)
# Those that end with a job that runs, if one does, or with nodes that are down for now.
MAY_END = re.compile(
    r"(QOS|Assoc)(Grp|Max)\w+|Max\w+PerAccount|PartitionNodeLimit|AccountingPolicy"
)

# What sbatch says of a request that it will not take later either.
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
ADVICE = "`keycut check --profile PROFILE` says which line of the profile to change. "


def export_end_time() -> None:
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


def refused_for_good(message: str) -> bool:
    """Whether sbatch would refuse this request again, however often it is asked."""
    limits = re.findall(r"\w+", message)  # it names a limit of an account in a line of its own
    return any(words in message for words in REFUSED) or any(map(FOREVER.fullmatch, limits))


def fail_refused_jobs_at_once() -> None:
    """Keep Snakemake from submitting a job again, for more memory and time, that Slurm refused."""
    plugin = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None:
        return
    report = plugin.Executor._report_job_error_threadsafe  # of submissions alone

    def final_if_refused(executor: Any, info: Any, message: str) -> None:
        # The words of sbatch and what it was asked, without the kilobytes that the job would run.
        message = message.partition(" --wrap=")[0]
        if refused_for_good(message):
            # Not its `attempt`: that evaluates the resources anew, and the scheduler gets back
            # what the job holds.
            info.job._attempt = info.job.restart_times + 1
            message += "\n    It is not tried again: Slurm would refuse it again. " + ADVICE
        report(executor, info, f"{message}\n")

    plugin.Executor._report_job_error_threadsafe = final_if_refused


def warn_of_jobs_that_never_start(executor: Any, warn: Callable[[str], None]) -> None:
    """Keep asking Slurm why jobs of this run wait, and say which of them always will."""
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
                continue  # no process to be had, or no squeue for now
            # No answer is the plugin's to handle: it asks the same.
            for line in stuck(queue.stdout, known):
                warn(line)

    threading.Thread(target=watch, name="slurm_watch", daemon=True).start()


def stuck(queue: str, known: set[tuple[str, str]]) -> Iterator[str]:
    """A line for every rule and reason with jobs that will not start by themselves.

    `queue`: squeue's lines of COLUMNS. `known`: the jobs and reasons that were said; those said now
    are added.
    """
    jobs = [line.split("|", 5) for line in queue.splitlines() if line.count("|") >= 5]
    any_runs = any(state != "PENDING" for _, state, *_ in jobs)
    waiting: dict[tuple[str, ...], list[str]] = {}
    for number, state, reason, partition, limit, comment in jobs:
        final = FOREVER.fullmatch(reason) or HELD.fullmatch(reason)
        if state != "PENDING" or (number, reason) in known:
            continue
        if final or (MAY_END.fullmatch(reason) and not any_runs):
            known.add((number, reason))
            rule = comment.removeprefix("rule_").partition("_wildcards_")[0]
            waiting.setdefault((rule, reason, partition, limit), []).append(number)
    for (rule, reason, partition, limit), numbers in waiting.items():
        more = f" and {len(numbers) - 1} more" if numbers[1:] else ""
        asked = f"Slurm job {numbers[0]}{more} (rule {rule}; {limit} in partition {partition})"
        if HELD.fullmatch(reason):
            yield f"{asked}: held, {reason}. `scontrol release {','.join(numbers)}` lets it start."
        elif FOREVER.fullmatch(reason):
            yield (
                f"{asked}: will never start, {reason}. {ADVICE}Then stop this run (Ctrl-C) and "
                "start it again: what is done is kept."
            )
        else:
            yield (
                f"{asked}: waits, {reason}, while no job of this run runs. If none of your others "
                f"does, and no node is down, it asks for too much and will never start. {ADVICE}"
            )


@contextmanager
def requeue_at_time_limit(rule: str) -> Iterator[None]:
    """Around the work of a rule: if it is to go on later, Slurm queues the same job again."""
    try:
        yield
    except SystemExit as left:
        if left.code == EXIT_UNFINISHED and "SLURM_JOB_ID" in os.environ:
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
