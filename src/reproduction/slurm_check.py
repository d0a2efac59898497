"""What a Slurm cluster can never run of a profile's requests, and why.

The requests are the sbatch commands that Snakemake's plugin would run, for every job and attempt;
the cluster is what scontrol shows. Slurm itself says little beforehand: `sbatch --test-only` takes
a job that is longer than its partition allows.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from getpass import getuser
from logging import CRITICAL, Logger
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.dag import build_dag, parse_arguments
from statecut.errors import InputError

# What sbatch refuses for now, and a later attempt may get.
FOR_NOW = re.compile(
    r"not available|temporarily|timed out|unable to contact|transmitted|connect|standby|SubmitJob"
    r"|Grp(?!\w*Minutes)|down|busy",
    re.I,
)


class Node(NamedTuple):
    """What a job may have of a node."""

    cpus: float
    memory_mb: float
    gpus: Mapping[str, int]  # of each kind; the kind is "" where Slurm does not know it

    def gpus_of(self, kind: str) -> int:
        return self.gpus.get(kind, 0) if kind else sum(self.gpus.values())


class Partition(NamedTuple):
    name: str
    default: bool
    state: str
    minutes: float
    nodes: tuple[Node, ...]
    accounts: str = "ALL"  # that may use it
    not_accounts: str = ""

    def takes(self, account: str) -> bool:
        allowed = self.accounts == "ALL" or account in self.accounts.split(",")
        return allowed and account not in self.not_accounts.split(",")


class Request(NamedTuple):
    """One sbatch command."""

    rule: str
    attempt: int
    command: str

    def option(self, name: str, default: str = "0") -> str:
        match = re.search(rf" --?{name}[ =](\S+)", self.command)
        return match[1] if match else default


Problem = tuple[str, str]  # the resource that is to change, and why


def read_cluster() -> dict[str, Partition]:
    """The partitions of the cluster that this machine belongs to."""
    texts = []
    for kind in ("partition", "node"):
        command = ["scontrol", "show", kind, "--oneliner", "--all"]
        try:
            texts.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "").strip() or "there is no scontrol here"
            advice = "check a profile for Slurm on the cluster's login node"
            raise InputError(f"{reason}: {advice}") from None
    return parse_cluster(*texts)


def parse_cluster(partitions: str, nodes: str) -> dict[str, Partition]:
    """`scontrol show partition --oneliner` and `scontrol show node --oneliner`."""
    cluster, all_nodes = {}, [_fields(line) for line in nodes.splitlines() if line.strip()]
    for fields in (_fields(line) for line in partitions.splitlines() if line.strip()):
        name = fields["PartitionName"]
        members = [node for node in all_nodes if name in node.get("Partitions", "").split(",")]
        cluster[name] = Partition(
            name, fields["Default"] == "YES", fields["State"], to_minutes(fields["MaxTime"]),
            tuple(_node(node, fields) for node in members),
            fields.get("AllowAccounts", "ALL"), fields.get("DenyAccounts", ""),
        )  # fmt: skip
    return cluster


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))


def _node(node: dict[str, str], partition: dict[str, str]) -> Node:
    def limit(name: str) -> float:
        text = partition.get(name, "")
        return int(text) if text.isdecimal() and text != "0" else inf

    gpus: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)", node.get("Gres", "")):
        gpus[kind] = gpus.get(kind, 0) + int(count)
    cpus = int(node.get("CPUEfctv", node["CPUTot"]))
    memory = int(node["RealMemory"]) - int(node.get("MemSpecLimit", 0))
    return Node(min(cpus, limit("MaxCPUsPerNode")), min(memory, limit("MaxMemPerNode")), gpus)


@cache
def default_account() -> str:
    """This user's; "" where Slurm keeps no accounts."""
    show = ["sacctmgr", "--noheader", "--parsable2", "show", "user", getuser()]
    try:
        shown = subprocess.run(
            [*show, "format=defaultaccount"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return shown.stdout.strip()


def to_minutes(time: str) -> float:
    """Minutes, as in sbatch's command; or [days-]hours:minutes:seconds, as scontrol shows them."""
    if time.isdecimal():
        return int(time)
    if not (match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", time)):
        return inf  # UNLIMITED, INFINITE, NONE
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 1440 * days + 60 * hours + minutes + seconds / 60


def judge(request: Request, cluster: Mapping[str, Partition]) -> list[Problem]:
    """What keeps the partitions that a request names from running it; [] if one of them can."""
    default = [name for name in cluster if cluster[name].default]
    names = request.option("p", ",".join(default)).split(",")
    if unknown := [name for name in names if name not in cluster]:
        known = ", ".join(sorted(cluster))
        return [("slurm_partition", f"there is no partition {unknown[0]!r}, only {known}")]
    return min(([*problems(request, cluster[name])] for name in names), key=len)


def problems(request: Request, partition: Partition) -> Iterator[Problem]:
    where, nodes = f"partition {partition.name}", partition.nodes
    if partition.state != "UP" or not nodes:
        yield "slurm_partition", f"{where} {f'is {partition.state}' if nodes else 'has no nodes'}"
        return
    # Where partitions' limits are not enforced, Slurm takes such a job and never starts it.
    if (partition.accounts, partition.not_accounts) != ("ALL", ""):
        account = request.option("A", "") or default_account()
        if account and not partition.takes(account):
            yield "slurm_account", f"{where} takes no jobs of account {account}"
    kind, _, count = request.option("gpus").rpartition(":")
    # Slurm spreads a job that does not say how many nodes it takes.
    gpus = ceil(int(count) / int(request.option("nodes", str(max(1, int(count))))))
    asked = f"{gpus} GPU{'s' * (gpus != 1)}"
    kinds = {name for node in nodes for name in node.gpus}
    if gpus and not kinds:
        yield "gpu", f"asks for {asked}, {where} has none"
        return
    minutes = to_minutes(request.option("t"))
    if minutes > partition.minutes:
        yield "runtime", f"asks for {_time(minutes)}, {where} allows {_time(partition.minutes)}"
    if gpus and kind and kind not in kinds:
        known = ", ".join(sorted(filter(None, kinds))) or "no kinds"
        yield "gpu_model", f"asks for a GPU of kind {kind}, {where} has {known}"
        return
    per_gpu = int(request.option("cpus-per-gpu"))
    per_task = int(request.option("ntasks", "1")) * int(request.option("cpus-per-task", "1"))

    def lacking(node: Node) -> Iterator[Problem]:
        has = node.gpus_of(kind)
        cores = per_gpu * min(gpus, has) or per_task  # fewer GPUs, fewer cores
        memory = int(request.option("mem")) or cores * int(request.option("mem-per-cpu"))
        if gpus > has:
            yield "gpu", f"asks for {asked}, a node of {where} has {has}"
        if cores > node.cpus:
            key = "cpus_per_gpu" if per_gpu and gpus else "set-threads"
            yield key, f"asks for {cores} cores, a node of {where} has {node.cpus}"
        if memory > node.memory_mb:
            text = f"asks for {memory / 1000:.4g} GB, a node of {where} has"
            yield "mem_mb", f"{text} {node.memory_mb / 1000:.4g} GB"

    largest = sorted(nodes, key=lambda node: (node.gpus_of(kind), node.memory_mb), reverse=True)
    yield from min(([*lacking(node)] for node in largest), key=len)


def _time(minutes: float) -> str:
    return f"{minutes / 60:.3g} h" if minutes >= 60 else f"{minutes:.0f} min"


@cache
def refusals(command: str) -> list[Problem]:
    """What Slurm itself refuses of a request that its nodes could meet: an account, a QOS, ..."""
    test = subprocess.run(
        [*shlex.split(command), "--test-only", "--wrap=true"], capture_output=True, text=True
    )
    message = " ".join(test.stderr.split())
    if not test.returncode or FOR_NOW.search(message):
        return []
    return [("sbatch", message)]


def findings(requests: Iterable[Request], cluster: Mapping[str, Partition]) -> list[str]:
    """What can never be had: rules, resource and reason; of each the first attempt that asks for
    too much."""
    first: dict[tuple[str, str], str] = {}
    for request in sorted(requests, key=lambda asked: (asked.attempt, asked.rule, asked.command)):
        for key, text in judge(request, cluster) or refusals(request.command):
            attempt = f"attempt {request.attempt} " if request.attempt > 1 else ""
            first.setdefault((request.rule, key), f"{key}: {attempt}{text}")
    rules: dict[str, list[str]] = {}
    for (rule, _), finding in first.items():
        rules.setdefault(finding, []).append(rule)
    return [f"{', '.join(rules[finding])}: {finding}" for finding in sorted(rules)]


def read_requests(arguments: Any, plugin: Any, partition_file: Path | None) -> set[Request]:
    """The sbatch commands of all jobs of the run, finished ones too, at every attempt."""
    from snakemake_executor_plugin_slurm.partitions import get_best_partition, read_partition_file
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    settings = plugin.get_settings(arguments)
    choices = read_partition_file(partition_file) if partition_file else None
    silent = Logger("partitions", CRITICAL)

    def request(job: Any, attempt: int) -> Request:
        job.attempt = attempt
        partition = job.resources.get("slurm_partition")
        if choices and not partition:
            partition = get_best_partition(choices, job, silent)
        account = str(job.resources.get("slurm_account") or "").replace(",", " ").split()
        options = {
            "run_uuid": "check", "comment_str": "check", "slurm_logfile": "/dev/null",
            "account": f"-A {shlex.quote(account[0])}" if account else "",
            "partition": f"-p {shlex.quote(str(partition))}" if partition else "",
            "workdir": None,
        }  # fmt: skip
        command = get_submit_command(job, options, settings=settings) + set_gres_string(job)
        return Request(job.rule.name, attempt, command)

    with build_dag(arguments, executor=plugin) as built:
        # One of all jobs that ask for the same at first: there are hundreds, each takes time.
        distinct = {request(job, 1): job for job in built.dag.jobs if not job.is_local}
        attempts = range(1, arguments.retries + 2)
        return {request(job, attempt) for job in distinct.values() for attempt in attempts}


def unmet_requests(
    profile: str, configfile: Path | str, *, rehearsal: bool = False
) -> tuple[int, list[str]]:
    """How many rules submit jobs to the cluster of this machine, and what of that it can never
    meet."""
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    arguments = parse_arguments(profile, configfile, rehearsal=rehearsal)
    if arguments.executor != "slurm":
        raise InputError(f"profile {profile!r}: its executor is not slurm; give FILE alone")
    cluster, plugin = read_cluster(), ExecutorPluginRegistry().get_plugin("slurm")
    file = plugin.get_settings(arguments).partition_config
    file = file or os.environ.get("SNAKEMAKE_SLURM_PARTITIONS")
    requests = read_requests(arguments, plugin, Path(file) if file else None)
    unmet = [f"{profile}: {finding}" for finding in findings(requests, cluster)]
    return len({request.rule for request in requests}), unmet
