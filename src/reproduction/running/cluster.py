"""What a Slurm cluster has, what an sbatch asks for, and why the cluster can never run it.

The cluster is read from scontrol. Slurm itself says little beforehand: `sbatch --test-only` takes a
job that is longer than its partition allows.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf

from statecut.errors import InputError


@dataclass(frozen=True)
class Node:
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]  # of each kind; the kind is "" where Slurm does not know it
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
    kinds = ("partition", "node")
    return parse_cluster(*(_scontrol("show", kind, "--oneliner", "--all") for kind in kinds))


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
    all_nodes = [_node(fields) for fields in map(_fields, nodes.splitlines()) if fields]
    cluster = {}
    for fields in filter(None, map(_fields, partitions.splitlines())):
        name = fields["PartitionName"]
        cluster[name] = Partition(
            name=name,
            default=fields["Default"] == "YES",
            state=fields["State"],
            minutes=to_minutes(fields["MaxTime"]),
            nodes=tuple(node for node in all_nodes if name in node.partitions),
            cpus_per_node=_limit(fields.get("MaxCPUsPerNode", "")),
            memory_per_node=_limit(fields.get("MaxMemPerNode", "")),
            hidden=fields.get("Hidden") == "YES",
        )
    return cluster


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
    options, _ = _SBATCH.parse_known_args(shlex.split(command))
    kind, _, count = options.gpus.rpartition(":")
    # Slurm spreads a job that does not say how many nodes it takes.
    gpus = ceil(int(count) / options.nodes) if options.nodes else min(1, int(count))
    tasks = options.ntasks * options.cpus_per_task
    cpus = max(gpus * options.cpus_per_gpu, tasks)
    return SlurmRequest(
        partitions=tuple(filter(None, options.partition.split(","))),
        minutes=to_minutes(options.time),
        memory_mb=options.mem or cpus * options.mem_per_cpu,
        cpus=cpus,
        gpus=gpus,
        gpu_kind=kind,
        cpus_by_gpu=gpus * options.cpus_per_gpu > tasks,
    )


_SBATCH = argparse.ArgumentParser(allow_abbrev=False)
_SBATCH.add_argument("-p", dest="partition", default="")
_SBATCH.add_argument("-t", dest="time", default="0")
_SBATCH.add_argument("--gpus", default="0")
for _name, _default in {"nodes": 0, "ntasks": 1, "cpus-per-task": 1, "cpus-per-gpu": 0,
                        "mem": 0, "mem-per-cpu": 0}.items():  # fmt: skip
    _SBATCH.add_argument(f"--{_name}", type=int, default=_default)


@dataclass(frozen=True)
class Problem:
    """Why a partition can never run a request."""

    key: str  # the resource that is to change
    text: str
    limit: str = ""  # what can be asked of it instead
    of_rule: bool = True  # or of every rule that goes there


def judge(request: SlurmRequest, cluster: Mapping[str, Partition]) -> list[Problem]:
    """What keeps the partitions that a request names from running it; [] if one of them can."""
    names = request.partitions or tuple(name for name in cluster if cluster[name].default)
    if not names:
        text = "names no partition, and the cluster has no default"
        return [Problem("slurm_partition", text, of_rule=False)]
    if unknown := [name for name in names if name not in cluster]:
        known = ", ".join(sorted(cluster))
        text = f"there is no partition {unknown[0]}, only {known}"
        return [Problem("slurm_partition", text, of_rule=False)]
    return min((list(problems(request, cluster[name])) for name in names), key=distance)


def distance(of_partition: list[Problem]) -> tuple[bool, int]:
    """How far a partition is from a request; a wrong one is farther than a small one."""
    return any(problem.key == "slurm_partition" for problem in of_partition), len(of_partition)


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
        names = ", ".join(filter(None, kinds)) or "no kinds"
        text = f"asks for a GPU of kind {request.gpu_kind}, {where} has {names}"
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
    too_much = [part for part in wanted if part[1] > part[2]]
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
