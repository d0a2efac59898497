"""Whether a Slurm cluster can ever give what each rule of a profile asks for.

What is asked is read from the sbatch commands that Snakemake's plugin would run, for every job and
attempt; what there is, from scontrol. Slurm itself says little beforehand: `sbatch --test-only`
takes a job that is longer than its partition allows.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from logging import CRITICAL, Logger
from math import ceil, inf
from pathlib import Path
from typing import Any

import yaml

from keycut.errors import InputError
from keycut.running.dag import build_dag, parse_arguments
from keycut.running.slurm import RESUMED, refused_for_good

# What a file of partitions calls the limit of a resource.
LIMITS = {"runtime": "max_runtime", "mem_mb": "max_mem_mb", "threads": "max_threads",
          "gpu": "max_gpu", "gpu_model": "available_gpu_models"}  # fmt: skip


# ---- What there is --------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]  # of each kind; the kind is "" where Slurm was not told
    partitions: frozenset[str]

    def gpus_of(self, kind: str) -> int:
        return self.gpus.get(kind, 0) if kind else sum(self.gpus.values())


@dataclass(frozen=True)
class Partition:
    name: str
    default: bool
    state: str
    minutes: float
    nodes: tuple[Node, ...]
    cpus_per_node: float = inf
    memory_per_node: float = inf
    hidden: bool = False

    def most(self, kind: str = "") -> tuple[int, float, float]:
        """The most GPUs, CPUs and memory (MB) that a node has; each of another one, perhaps."""
        return (
            max((node.gpus_of(kind) for node in self.nodes), default=0),
            min(self.cpus_per_node, max((node.cpus for node in self.nodes), default=0)),
            min(self.memory_per_node, max((node.memory_mb for node in self.nodes), default=0)),
        )


def read_cluster() -> dict[str, Partition]:
    """The partitions of the cluster that this machine belongs to."""
    asked = [_scontrol("show", kind, "--oneliner", "--all") for kind in ("partition", "node")]
    return parse_cluster(*asked)


def _scontrol(*command: str) -> str:
    try:
        done = subprocess.run(["scontrol", *command], capture_output=True, text=True)
    except FileNotFoundError:
        raise InputError(
            "there is no scontrol here: check a profile for Slurm on the cluster's login node"
        ) from None
    if done.returncode:
        raise InputError(f"scontrol {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def parse_cluster(partitions: str, nodes: str) -> dict[str, Partition]:
    """`scontrol show partition --oneliner` and `scontrol show node --oneliner`."""
    machines = [_node(fields) for fields in map(_fields, nodes.splitlines()) if fields]
    found = {}
    for fields in filter(None, map(_fields, partitions.splitlines())):
        name = fields["PartitionName"]
        found[name] = Partition(
            name=name,
            default=fields["Default"] == "YES",
            state=fields["State"],
            minutes=to_minutes(fields["MaxTime"]),
            nodes=tuple(node for node in machines if name in node.partitions),
            cpus_per_node=_limit(fields.get("MaxCPUsPerNode", "")),
            memory_per_node=_limit(fields.get("MaxMemPerNode", "")),
            hidden=fields.get("Hidden") == "YES",
        )
    return found


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))


def _node(fields: dict[str, str]) -> Node:
    gpus: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)", fields.get("Gres", "")):
        gpus[kind] = gpus.get(kind, 0) + int(count)
    return Node(
        cpus=int(fields.get("CPUEfctv", fields["CPUTot"])),
        memory_mb=int(fields["RealMemory"]) - int(fields.get("MemSpecLimit", 0)),
        gpus=gpus,
        partitions=frozenset(fields.get("Partitions", "").split(",")),
    )


def _limit(text: str) -> float:
    return int(text) if text.isdecimal() and text != "0" else inf


def to_minutes(time: str) -> float:
    """Slurm's times: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return inf  # UNLIMITED, INFINITE, NONE
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 1440 * int(days or 0) + 60 * hours + minutes + seconds / 60


# ---- What is asked --------------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmRequest:
    """What one sbatch asks for."""

    partitions: tuple[str, ...]  # any of them; none for the cluster's default
    minutes: float  # 0 where it does not say
    memory_mb: int
    cpus: int  # on a node
    gpus: int  # on a node
    gpu_kind: str
    cpus_by_gpu: bool = False


def parse_sbatch(command: str) -> SlurmRequest:
    given, _ = _SBATCH.parse_known_args(shlex.split(command))
    kind, _, count = given.gpus.rpartition(":")
    # Slurm spreads a job that does not say how many nodes it takes.
    gpus = ceil(int(count) / given.nodes) if given.nodes else min(1, int(count))
    tasks = given.ntasks * given.cpus_per_task
    cpus = max(gpus * given.cpus_per_gpu, tasks)
    return SlurmRequest(
        partitions=tuple(filter(None, given.partition.split(","))),
        minutes=to_minutes(given.time),
        memory_mb=given.mem or cpus * given.mem_per_cpu,
        cpus=cpus,
        gpus=gpus,
        gpu_kind=kind,
        cpus_by_gpu=gpus * given.cpus_per_gpu > tasks,
    )


_SBATCH = argparse.ArgumentParser(allow_abbrev=False)
_SBATCH.add_argument("-p", dest="partition", default="")
_SBATCH.add_argument("-t", dest="time", default="0")
_SBATCH.add_argument("--gpus", default="0")
for _name, _default in {"nodes": 0, "ntasks": 1, "cpus-per-task": 1, "cpus-per-gpu": 0,
                        "mem": 0, "mem-per-cpu": 0}.items():  # fmt: skip
    _SBATCH.add_argument(f"--{_name}", type=int, default=_default)


# ---- What cannot be met ---------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Why a partition can never run a request."""

    key: str  # the resource that is to change
    text: str
    limit: str = ""  # what can be asked of it instead
    of_rule: bool = True  # or of every rule that goes there


def judge(request: SlurmRequest, cluster: Mapping[str, Partition]) -> list[Problem]:
    """What keeps the partitions that a request names from running it; [] if one of them can."""
    names = request.partitions or tuple(one.name for one in cluster.values() if one.default)
    if not names:
        text = "names no partition, and the cluster has no default"
        return [Problem("slurm_partition", text, of_rule=False)]
    if unknown := [name for name in names if name not in cluster]:
        known = ", ".join(sorted(cluster))
        text = f"partition {unknown[0]} is not there, {known} are"
        return [Problem("slurm_partition", text, of_rule=False)]
    found = [list(problems(request, cluster[name])) for name in names]
    return min(found, key=_distance)


def _distance(found: list[Problem]) -> tuple[bool, int]:
    """How far a partition is from what is asked; a wrong one is farther than one that is small."""
    return any(one.key == "slurm_partition" for one in found), len(found)


def problems(request: SlurmRequest, partition: Partition) -> Iterator[Problem]:
    where = f"partition {partition.name}"
    if partition.state != "UP":
        yield Problem("slurm_partition", f"{where} is {partition.state}", of_rule=False)
        return
    if not partition.nodes:
        yield Problem("slurm_partition", f"{where} has no nodes", of_rule=False)
        return
    gpus, cpus, memory = partition.most(request.gpu_kind)
    count = f"{request.gpus} GPU{'s' * (request.gpus != 1)}"
    if request.gpus and not partition.most()[0]:
        yield Problem("slurm_partition", f"asks for {count}, {where} has none")
        return
    if request.minutes > partition.minutes:
        yield Problem(
            "runtime",
            f"asks for {_time(request.minutes)}, {where} allows {_time(partition.minutes)}",
            f"{partition.minutes:.0f}",
        )
    if request.gpus and not gpus:
        kinds = sorted({kind for node in partition.nodes for kind in node.gpus})
        there = ", ".join(filter(None, kinds)) or "no kinds"
        text = f"asks for a GPU of kind {request.gpu_kind}, {where} has {there}"
        yield Problem("gpu_model", text, f'"{kinds[-1]}"')
        return
    cores_key, cores, each = "threads", request.cpus, 1
    if request.cpus_by_gpu:  # fewer GPUs, fewer cores
        each = min(request.gpus, gpus)
        cores_key, cores = "cpus_per_gpu", request.cpus // request.gpus * each
    wanted = [
        ("gpu", request.gpus, gpus, count, gpus),
        (cores_key, cores, cpus, f"{cores} cores", cpus // each),
        ("mem_mb", request.memory_mb, memory, _gb(request.memory_mb), memory),
    ]  # fmt: skip
    too_much = [one for one in wanted if one[1] > one[2]]
    for key, _, most, text, limit in too_much:
        node_has = _gb(most) if key == "mem_mb" else f"{most}"
        yield Problem(key, f"asks for {text}, a node of {where} has {node_has}", f"{limit:.0f}")
    fits = any(
        node.gpus_of(request.gpu_kind) >= request.gpus
        and node.cpus >= cores
        and node.memory_mb >= request.memory_mb
        for node in partition.nodes
    )
    if not fits and not too_much:
        together = ", ".join(text for *_, text, _ in wanted)
        yield Problem("mem_mb", f"asks for {together} together, which no node of {where} has")


def _time(minutes: float) -> str:
    return f"{minutes / 60:.3g} h" if minutes >= 60 else f"{minutes:.0f} min"


def _gb(mb: float) -> str:
    return f"{mb / 1000:.4g} GB"


# ---- Which line is to change ----------------------------------------------------------------


@dataclass(frozen=True)
class Submission:
    """What Snakemake would submit of a rule."""

    rule: str
    attempt: int
    command: str
    by_file: bool = False  # whether the profile's file of partitions chose where it goes


class Profile:
    """The files of a profile, to name the line that says what a rule asks for."""

    def __init__(self, file: Path, partition_file: Path | None = None) -> None:
        self.file, self.partition_file = file, partition_file
        self.keys = _keys(file)
        self.limits = _keys(partition_file) if partition_file else {}

    def place(self, rule: str, problem: Problem) -> tuple[str, str]:
        """FILE:LINE of a resource, or where to add it, and what stands there."""
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
        """FILE:LINE of what the file of partitions says of a resource, or of the partition."""
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

    Of a rule and a resource the first attempt that asks for too much.
    """
    first: dict[tuple[str, str], tuple[str, str]] = {}
    ordered = sorted(submissions, key=lambda one: (one.attempt, one.rule, one.command))
    requests: dict[str, list[SlurmRequest]] = {}
    for asked in ordered:
        requests.setdefault(asked.rule, []).append(parse_sbatch(asked.command))
    for asked in ordered:
        request = parse_sbatch(asked.command)
        able = sorted(
            name
            for name, one in cluster.items()
            if not one.hidden and not any(list(problems(r, one)) for r in requests[asked.rule])
        )
        for problem in judge(request, cluster) or _tested(asked.command):
            place, write = _advice(asked, request, problem, cluster, profile, able)
            which = f"attempt {asked.attempt} " if asked.attempt > 1 else ""
            found = (place, f"{which}{problem.text}{write}")
            first.setdefault((asked.rule, problem.key), found)
    rules: dict[tuple[str, str], list[str]] = {}
    for (rule, _), found in first.items():
        rules.setdefault(found, []).append(rule)
    lines = [f"{place}: {', '.join(rules[place, text])}: {text}" for place, text in rules]
    return sorted(lines, key=lambda line: [int(one) for one in re.findall(r":(\d+): ", line)[:1]])


def _advice(
    asked: Submission,
    request: SlurmRequest,
    problem: Problem,
    cluster: Mapping[str, Partition],
    profile: Profile,
    able: list[str],
) -> tuple[str, str]:
    """The line to change, and what to write there. `able`: partitions that meet every attempt."""
    if asked.by_file:
        place = profile.place_of_limit(request.partitions[0], problem.key)
        limit = LIMITS.get(problem.key)
        return place, f"; write {limit}: {problem.limit}" if limit and problem.limit else ""
    place, value = profile.place(asked.rule, problem)
    if not judge(request, cluster):  # no partition is in the way, but Slurm's own word
        return place, ""
    choices, most = [], problem.limit
    others = {name: list(problems(request, one)) for name, one in cluster.items()}
    if profile.partition_file and problem.key == "runtime":
        # It goes wherever it fits: where nothing else is wrong, the longest time.
        alone = [
            found[0].limit for found in others.values() if [one.key for one in found] == ["runtime"]
        ]
        most = max(alone, key=int, default=most)
    if most:
        # Snakemake evaluates what stands there as Python, for each attempt.
        limit = f'"min({value}, {most})"' if value and asked.attempt > 1 else most
        line = f"{problem.key}: {limit}"
        # Cores are no resource to Snakemake.
        choices.append(
            f"set-threads: {{{asked.rule}: {most}}}" if problem.key == "threads" else line
        )
    if able:
        choices.append(f"slurm_partition: {' or '.join(able)}")
    elif problem.key == "slurm_partition":
        name, found = min(others.items(), key=lambda one: _distance(one[1]))
        if found[0].key != problem.key:
            # It would be the next thing to be said, once the partition is right.
            texts = ", ".join(one.text for one in found)
            choices = [f"slurm_partition: {name}", *(f"{one.key}: {one.limit}" for one in found)]
            return place, f"; nor can {name}: {texts}; write {', '.join(choices)}"
    if problem.key in ("runtime", "mem_mb") and problem.limit:
        resumed = problem.key == "runtime" and asked.rule in RESUMED
        choices[0] += " (it goes on in the queue)" if resumed else " (if that is enough)"
    return place, f"; write {', or '.join(choices)}" if choices else ""


@cache
def _tested(command: str) -> list[Problem]:
    """What Slurm itself refuses of a request that its nodes could meet: an account, a QOS, ..."""
    test = subprocess.run(
        [*shlex.split(command), "--test-only", "--wrap=true"], capture_output=True, text=True
    )
    said = " ".join(test.stderr.split())
    # "not available" may be for now: nodes that are down or drained count here.
    if not test.returncode or "not available" in said or not refused_for_good(said):
        return []
    known = {"invalid account": "slurm_account", "wall": "runtime", "qos": "qos",
             "feature": "constraint"}  # fmt: skip
    key = next((known[word] for word in known if word in said.lower()), "slurm_partition")
    return [Problem(key, f"sbatch refuses it: {said}")]


# ---- What Snakemake would submit ------------------------------------------------------------


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
        given = {
            "run_uuid": "check", "comment_str": "check", "slurm_logfile": "/dev/null",
            "account": f"-A {shlex.quote(account[0])}" if account else "",
            "partition": f"-p {shlex.quote(str(partition))}" if partition else "",
            "workdir": None,
        }  # fmt: skip
        command = get_submit_command(job, given, settings=settings) + set_gres_string(job)
        return Submission(job.rule.name, attempt, command, by_file=chosen is not None)

    # Of jobs that ask for the same at first, one: there are hundreds, and each takes milliseconds.
    different = {submission(job, 1): job for job in jobs if not job.is_local}
    for job in different.values():
        yield from (submission(job, attempt) for attempt in range(1, retries + 2))


def profile_config(profile: str | None) -> Path:
    """The configuration that a profile names."""
    if profile is None:
        raise InputError("nothing to check: give a configuration's FILE or --profile")
    named = parse_arguments(profile).configfile
    if not named:
        raise InputError(f"profile {profile!r} names no configuration: give FILE")
    return Path(named[-1])


def unmet_requests(profile: str, configfile: Path) -> tuple[int, list[str]]:
    """How many rules ask the cluster that this machine belongs to for something, and what of it
    can never be had."""
    from snakemake.cli import get_profile_dir

    arguments = parse_arguments(profile, configfile)
    if arguments.executor != "slurm":
        raise InputError(f"profile {profile!r}: its executor is not slurm, there is none to ask")
    cluster = read_cluster()
    file = get_profile_dir(profile)[1]
    named = _plugin().get_settings(arguments).partition_config
    named = named or os.environ.get("SNAKEMAKE_SLURM_PARTITIONS")
    partition_file = Path(named) if named else None
    submissions = read_submissions(arguments, partition_file)
    unmet = findings(submissions, cluster, Profile(file, partition_file))
    return len({one.rule for one in submissions}), unmet
