"""A real Slurm on this machine for the length of a test: munged, slurmctld, two slurmd.

Two nodes of 16 pretended CPUs and two pretended GPUs each. Nothing is written outside one folder
under /tmp, nothing needs root, and everything that was started is ended by its process id.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("node1", "node2")
GPUS = 2  # of each node
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])  # where Debian has the daemons


def missing() -> list[str]:
    """Programs of Slurm that this machine has not."""
    return [program for program in NEEDED if shutil.which(program, path=PATH) is None]


@dataclass
class Cluster:
    """The daemons, and what tests do to them."""

    folder: Path = field(
        # Short: a socket's path may have 107 characters.
        default_factory=lambda: Path(tempfile.mkdtemp(prefix="statecut-slurm-", dir="/tmp"))
    )

    def start(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        for name in ("bin", "dev", "state", *NODES):
            (self.folder / name).mkdir()
        self._configure()
        self._daemon(
            "munged", "--force", f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.sock", f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_until_idle()

    def stop(self) -> None:
        """End all jobs, then the daemons, and leave nothing."""
        if self._pid("slurmctld"):
            self.run("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
            self.wait(lambda: not self.run("squeue", "-h"), "jobs that end")
        for daemon in (*NODES, "slurmctld", "munged"):
            self._end(daemon, signal.SIGTERM)
        shutil.rmtree(self.folder)

    @property
    def environment(self) -> dict[str, str]:
        """For every command that is to speak to this Slurm."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return kept | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder}/bin{os.pathsep}{PATH}",
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def start_controller(self) -> None:
        self._daemon("slurmctld")

    def kill_controller(self) -> None:
        self._end("slurmctld", signal.SIGKILL)

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """As if its machine were lost to the controller: jobs on it are on their own."""
        self._end(node, signal.SIGKILL)

    def wait_until_idle(self) -> None:
        def up() -> bool:
            states = self.run("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
            return sum(line.endswith(" idle") for line in set(states)) == len(NODES)

        self.wait(up, "nodes that are idle")

    def ended(self) -> list[dict[str, str]]:
        """What Slurm wrote down of each job that ended; a requeued one is there many times."""
        file = self.folder / "jobs.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [dict(pair.split("=", 1) for pair in line.split(" ") if "=" in pair)
                for line in lines]  # fmt: skip

    def _configure(self) -> None:
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        for number in range(GPUS):
            # slurmd wants a character device for each GPU.
            (self.folder / "dev" / f"gpu{number}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(
            f"NodeName=node[1-2] Name=gpu Type=h100 File={self.folder}/dev/gpu[0-{GPUS - 1}]\n"
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "slurm.conf").write_text(self._conf())
        # The step inside a job forgets SLURM_CONF: there srun must find this Slurm by itself.
        srun = self.folder / "bin" / "srun"
        real = shutil.which("srun", path=PATH)
        srun.write_text(f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {real} "$@"\n')
        srun.chmod(0o755)

    def _conf(self) -> str:
        user = pwd.getpwuid(os.getuid()).pw_name
        host = socket.gethostname().split(".")[0]
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=16"
            f" RealMemory=2000000 Gres=gpu:h100:{GPUS}"
            for node, port in zip(NODES, ports, strict=True)
        )
        return f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
# A requeued job waits until its old credential has expired, by default two minutes.
AuthInfo=socket={self.folder}/munge.sock,cred_expire=5
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdPidFile={self.folder}/%n.pid
SlurmdLogFile={self.folder}/%n.log
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# Believe the CPUs and the memory that are declared.
SlurmdParameters=config_overrides
ReturnToService=2
# A node that does not answer for so long is lost.
SlurmdTimeout=15
KillWait=10
MinJobAge=300
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={self.folder}/jobs.txt
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""

    def _daemon(self, *command: str) -> None:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command[0]} does not start: {done.stderr.strip()}")

    def _pid(self, daemon: str) -> int | None:
        file = self.folder / f"{daemon}.pid"
        text = file.read_text().strip() if file.exists() else ""
        return int(text) if text and alive(int(text)) else None

    def _end(self, daemon: str, number: int) -> None:
        pid = self._pid(daemon)
        if pid is not None:
            os.kill(pid, number)
            self.wait(lambda: not alive(pid), f"{daemon} to end")

    def wait(self, ready: Callable[[], object], what: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not after {seconds:g} s; see {self.folder}/*.log")
            time.sleep(0.1)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
