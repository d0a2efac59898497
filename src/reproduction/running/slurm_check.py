"""Whether a Slurm cluster can ever meet what each rule asks for under a profile.

The requests are the sbatch commands that Snakemake's plugin would run, for every job and attempt.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from logging import CRITICAL, Logger
from pathlib import Path
from typing import Any

import yaml

from reproduction.running.cluster import (
    Partition,
    Problem,
    SlurmRequest,
    distance,
    judge,
    parse_sbatch,
    problems,
    read_cluster,
)
from reproduction.running.dag import build_dag, parse_arguments
from reproduction.running.slurm import RESUMED, refused_for_good
from statecut.errors import InputError

# What a file of partitions calls the limit of a resource.
LIMITS = {"runtime": "max_runtime", "mem_mb": "max_mem_mb", "threads": "max_threads",
          "gpu": "max_gpu", "gpu_model": "available_gpu_models"}  # fmt: skip


@dataclass(frozen=True)
class Submission:
    """What Snakemake would submit of a rule."""

    rule: str
    attempt: int
    command: str
    by_file: bool = False  # whether the profile's file of partitions chose the partition


class Profile:
    """The files of a profile, to name the line to change."""

    def __init__(self, file: Path, partition_file: Path | None = None) -> None:
        self.file, self.partition_file = file, partition_file
        self.keys = _keys(file)
        self.limits = _keys(partition_file) if partition_file else {}

    def place(self, rule: str, problem: Problem) -> tuple[str, str]:
        """FILE:LINE of a resource, or where to add it, and its value."""
        key = problem.key
        own = ("set-threads", rule) if key == "threads" else ("set-resources", rule, key)
        shared = ("default-resources", key)
        # Another partition is right for this rule, and may be wrong for others.
        moves = key == "slurm_partition" and problem.of_rule
        for path in (own, own[:2], shared, own[:1]) if moves else (own, shared, own[:2], own[:1]):
            if path in self.keys:
                line, value = self.keys[path]
                return f"{self.file}:{line}", value
        return str(self.file), ""

    def place_of_limit(self, partition: str, key: str) -> str:
        """FILE:LINE of a resource's limit in the file of partitions, or of the partition."""
        path = ("partitions", partition)
        line, _ = self.limits.get((*path, LIMITS.get(key, "")), self.limits[path])
        return f"{self.partition_file}:{line}"


def _keys(file: Path) -> dict[tuple[str, ...], tuple[int, str]]:
    """The line and the value of every key of a YAML file, by the keys around it and itself."""

    def below(node: Any, path: tuple[str, ...]) -> Iterator[Any]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            inner = (*path, key.value)
            scalar = value.value if isinstance(value, yaml.ScalarNode) else ""
            yield inner, (key.start_mark.line + 1, scalar)
            yield from below(value, inner)

    return dict(below(yaml.compose(file.read_text()), ()))


def findings(
    submissions: Iterable[Submission], cluster: Mapping[str, Partition], profile: Profile
) -> list[str]:
    """What can never be had, each with its line and the rules that ask for it.

    Of a rule and a resource, the first attempt that asks for too much.
    """
    ordered = sorted(submissions, key=lambda job: (job.attempt, job.rule, job.command))
    requests = {submission: parse_sbatch(submission.command) for submission in ordered}
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for submission, request in requests.items():
        rule, attempt = submission.rule, submission.attempt
        of_rule = [other for job, other in requests.items() if job.rule == rule]
        able = sorted(
            name
            for name, partition in cluster.items()
            if not partition.hidden
            and not any(any(problems(other, partition)) for other in of_rule)
        )
        for problem in judge(request, cluster) or refusals(submission.command):
            place, advice = _advice(submission, request, problem, cluster, profile, able)
            which = f"attempt {attempt} " if attempt > 1 else ""
            first.setdefault((rule, problem.key), (place, f"{which}{problem.text}{advice}"))
    rules: dict[tuple[str, str], list[str]] = {}
    for (rule, _), finding in first.items():
        rules.setdefault(finding, []).append(rule)
    lines = [f"{place}: {', '.join(rules[place, text])}: {text}" for place, text in rules]
    return sorted(lines, key=lambda line: [*map(int, re.findall(r":(\d+): ", line)[:1])])


def _advice(
    submission: Submission,
    request: SlurmRequest,
    problem: Problem,
    cluster: Mapping[str, Partition],
    profile: Profile,
    able: list[str],
) -> tuple[str, str]:
    """The line to change, and what to write there. `able`: partitions that meet every attempt."""
    if submission.by_file:
        place = profile.place_of_limit(request.partitions[0], problem.key)
        limit = LIMITS.get(problem.key)
        return place, f"; write {limit}: {problem.limit}" if limit and problem.limit else ""
    rule = submission.rule
    place, value = profile.place(rule, problem)
    if not judge(request, cluster):  # sbatch refuses it, and no partition is in the way
        return place, ""
    choices, most = [], problem.limit
    by_partition = {name: list(problems(request, cluster[name])) for name in cluster}
    if profile.partition_file and problem.key == "runtime":
        # It goes wherever it fits: where nothing else is wrong, the longest time.
        times = [
            unmet[0].limit
            for unmet in by_partition.values()
            if [problem.key for problem in unmet] == ["runtime"]
        ]
        most = max(times, key=int, default=most)
    if most:
        # Snakemake evaluates the value as Python, for each attempt.
        limit = f'"min({value}, {most})"' if value and submission.attempt > 1 else most
        # Cores are no resource to Snakemake.
        cores = f"set-threads: {{{rule}: {most}}}"
        choices.append(cores if problem.key == "threads" else f"{problem.key}: {limit}")
    if able:
        choices.append(f"slurm_partition: {' or '.join(able)}")
    elif problem.key == "slurm_partition":
        name = min(by_partition, key=lambda name: distance(by_partition[name]))
        unmet = by_partition[name]
        if unmet[0].key != problem.key:
            # It would be the next finding, once the partition is right.
            texts = ", ".join(other.text for other in unmet)
            choices = [f"slurm_partition: {name}", *(f"{p.key}: {p.limit}" for p in unmet)]
            return place, f"; nor can {name}: {texts}; write {', '.join(choices)}"
    if problem.key in ("runtime", "mem_mb") and problem.limit:
        resumed = problem.key == "runtime" and rule in RESUMED
        choices[0] += " (it is requeued to go on)" if resumed else " (if that is enough)"
    return place, f"; write {', or '.join(choices)}" if choices else ""


@cache
def refusals(command: str) -> list[Problem]:
    """What Slurm itself refuses of a request that its nodes could meet: an account, a QOS, ..."""
    test = subprocess.run(
        [*shlex.split(command), "--test-only", "--wrap=true"], capture_output=True, text=True
    )
    message = " ".join(test.stderr.split())
    # "not available" may be for now: nodes that are down or drained count here.
    if not test.returncode or "not available" in message or not refused_for_good(message):
        return []
    keys = {"invalid account": "slurm_account", "wall": "runtime", "qos": "qos",
            "feature": "constraint"}  # fmt: skip
    key = next((keys[word] for word in keys if word in message.lower()), "slurm_partition")
    return [Problem(key, f"sbatch refuses it: {message}")]


def _plugin() -> Any:
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    return ExecutorPluginRegistry().get_plugin("slurm")


def read_submissions(arguments: Any, partition_file: Path | None) -> set[Submission]:
    """The sbatch commands of all jobs of the run, finished ones too, at every attempt."""
    plugin = _plugin()
    settings = plugin.get_settings(arguments)
    with build_dag(arguments, executor=plugin) as built:
        return set(_submissions(built.dag.jobs, arguments.retries, settings, partition_file))


def _submissions(
    jobs: Iterable[Any], retries: int, settings: Any, partition_file: Path | None
) -> Iterator[Submission]:
    from snakemake_executor_plugin_slurm.partitions import get_best_partition, read_partition_file
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    choices = read_partition_file(partition_file) if partition_file else None
    silent = Logger("partitions", CRITICAL)

    def submission(job: Any, attempt: int) -> Submission:
        job.attempt = attempt
        named = job.resources.get("slurm_partition")
        chosen = None if named or not choices else get_best_partition(choices, job, silent)
        partition = named or chosen
        account = str(job.resources.get("slurm_account") or "").replace(",", " ").split()
        options = {
            "run_uuid": "check", "comment_str": "check", "slurm_logfile": "/dev/null",
            "account": f"-A {shlex.quote(account[0])}" if account else "",
            "partition": f"-p {shlex.quote(str(partition))}" if partition else "",
            "workdir": None,
        }  # fmt: skip
        command = get_submit_command(job, options, settings=settings) + set_gres_string(job)
        return Submission(job.rule.name, attempt, command, by_file=chosen is not None)

    # One of all jobs that ask for the same at first: there are hundreds, each takes milliseconds.
    distinct = {submission(job, 1): job for job in jobs if not job.is_local}
    for job in distinct.values():
        yield from (submission(job, attempt) for attempt in range(1, retries + 2))


def profile_config(profile: str | None) -> Path:
    """The configuration that a profile names."""
    if profile is None:
        raise InputError("nothing to check: give a configuration's FILE or --profile")
    configfiles = parse_arguments(profile).configfile
    if not configfiles:
        raise InputError(f"profile {profile!r} names no configuration: give FILE")
    return Path(configfiles[-1])


def unmet_requests(profile: str, configfile: Path) -> tuple[int, list[str]]:
    """How many rules submit jobs to the cluster of this machine, and what of that can never be
    had."""
    from snakemake.cli import get_profile_dir

    arguments = parse_arguments(profile, configfile)
    if arguments.executor != "slurm":
        raise InputError(
            f"profile {profile!r}: its executor is not slurm, so there is no cluster to ask; "
            "give FILE without --profile"
        )
    cluster = read_cluster()
    file = get_profile_dir(profile)[1]
    named = _plugin().get_settings(arguments).partition_config
    named = named or os.environ.get("SNAKEMAKE_SLURM_PARTITIONS")
    partition_file = Path(named) if named else None
    submissions = read_submissions(arguments, partition_file)
    unmet = findings(submissions, cluster, Profile(file, partition_file))
    return len({submission.rule for submission in submissions}), unmet
