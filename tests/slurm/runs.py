"""Runs of the workflow in a copy of the checkout: on this machine, or through Slurm."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from cluster import Cluster

ROOT = Path(__file__).parents[2]
# Digests of provenance and logs differ in time and place; these are what a run is for.
RESULTS = (
    "models", "selections", "sliced", "refitted", "recovered", "evaluations", "frames", "tables",
)  # fmt: skip


def checkout(folder: Path, config: dict[str, Any]) -> Path:
    """Copy what a run reads, so that nothing changes under it, and put its configuration there."""
    for name in ("config", "envs", "models", "profiles", "scripts", "src", "workflow"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def run_here(folder: Path, *targets: str) -> None:
    """The same run without Slurm."""
    command = [sys.executable, "-m", "reproduction.running.preload",
               sys.executable, "-m", "snakemake", *targets, "--configfile=run.yaml",
               "--cores=2"]  # fmt: skip
    with (folder / "here.log").open("w") as log:
        code = subprocess.run(
            command, cwd=folder, env=environment(folder, dict(os.environ)), stdout=log, stderr=log
        ).returncode
    assert code == 0, (folder / "here.log").read_text()


def environment(folder: Path, given: dict[str, str]) -> dict[str, str]:
    return given | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}


def results(folder: Path, run: str) -> dict[str, str]:
    """Digests of everything that holds no timings."""
    root = folder / "results" / run
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in RESULTS
        for path in sorted((root / name).rglob("*"))
        if path.is_file() and not path.name.endswith(".provenance.json")
    }


@dataclass
class SlurmRun:
    """`snakemake --profile profiles/slurm` in a checkout, and its jobs."""

    folder: Path
    cluster: Cluster
    # What tests change of the profile: how long rules may take, how often Slurm is asked.
    limits: dict[str, int] = field(default_factory=dict)
    jobs: int = 4
    asked_every: int = 3
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "slurm.log").read_text()

    def write_profile(self, **options: Any) -> None:
        profile = yaml.safe_load((self.folder / "profiles/slurm/config.yaml").read_text())
        for rule, minutes in self.limits.items():
            profile["set-resources"][rule]["runtime"] = minutes
        profile |= {
            "configfile": "run.yaml", "jobs": self.jobs, "latency-wait": 10,
            "slurm-init-seconds-before-status-checks": self.asked_every,
            **{name.replace("_", "-"): value for name, value in options.items()},
        }  # fmt: skip
        (self.folder / "profiles/tested").mkdir(exist_ok=True)
        (self.folder / "profiles/tested/config.yaml").write_text(yaml.safe_dump(profile))

    def start(self, *targets: str, **options: Any) -> SlurmRun:
        self.write_profile(**options)
        with (self.folder / "slurm.log").open("a") as log:
            self.process = subprocess.Popen(
                self.command(*targets), cwd=self.folder, env=self.environment(),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self

    def command(self, *targets: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", *targets, "--profile=profiles/tested"]

    def environment(self) -> dict[str, str]:
        return environment(self.folder, self.cluster.environment)

    def wait(self, seconds: float = 1800) -> int:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"not ended after {seconds:g} s:\n{self.log}") from None

    def stop(self) -> None:
        """As Ctrl-C would."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(300)

    def running(self, rule: str) -> list[str]:
        """Slurm's numbers of the jobs of a rule that run now."""
        lines = self.cluster.run("squeue", "-h", "--states=RUNNING", "-o", "%i %k").splitlines()
        return [line.split()[0] for line in lines if f"{line}_".partition(f" rule_{rule}_")[1]]

    def ended(self) -> list[dict[str, str]]:
        """What Slurm wrote down of this run's jobs."""
        return [job for job in self.cluster.ended() if job["WorkDir"] == str(self.folder.resolve())]

    def until(self, ready: Callable[[], Any], what: str, seconds: float = 900) -> Any:
        """Wait for something to become true while the run goes on."""
        end = time.monotonic() + seconds
        while not (found := ready()):
            assert self.process is None or self.process.poll() is None, f"{what}: over\n{self.log}"
            assert time.monotonic() < end, f"{what}: not after {seconds:g} s\n{self.log}"
            time.sleep(0.2)
        return found

    def until_training(self, rule: str) -> str:
        """Wait until a job of the rule has made some steps of training, and return its number."""
        self.until(lambda: self.running(rule), f"a job of {rule}")
        self.until(self._trains, f"steps of {rule}")
        return self.running(rule)[0]

    def _trains(self) -> bool:
        """Whether a curve is being written. A model that is ready leaves none."""
        curves = self.folder.glob("results/*/.checkpoints/*/loss.csv")
        return any(len(curve.read_text().splitlines()) > 5 for curve in curves)

    @contextmanager
    def held(self, job: str) -> Iterator[None]:
        """Stop the work of a job for the length of a block."""
        worker = self.scripts()[job]
        worker.suspend()
        try:
            yield
        finally:
            worker.resume()

    def until_evaluating(self) -> str:
        """Wait until a job that evaluates is in its script, and return its number."""
        return str(self.until(self._evaluates, "the work of an evaluation"))

    def _evaluates(self) -> str | None:
        return next((job for job in self.running("evaluate") if job in self.scripts()), None)

    def scripts(self) -> dict[str, psutil.Process]:
        """The processes of this run that work, by Slurm's numbers of their jobs."""
        found = {}
        for process in psutil.process_iter(["cmdline", "environ"]):
            words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
            if any(word.startswith(f"{self.folder}/.snakemake/scripts") for word in words):
                found[variables.get("SLURM_JOB_ID", "")] = process
        return found
