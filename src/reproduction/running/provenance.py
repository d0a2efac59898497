"""Where an output came from: a record beside it, written last. And which results are stale."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from reproduction.running.gpus import gpu_slots
from statecut.files import digest, read_json, write_json

PROVENANCE = ".provenance.json"
"""Added to the name of an artefact: the record of where it came from."""
PACKAGES = (
    "torch", "triton", "flash-linear-attention", "transformers", "peft", "lm-eval", "datasets",
    "numpy", "scipy", "pandas", "matplotlib", "snakemake", "flame", "torchtitan",
)  # fmt: skip


def provenance_path(artefact: Path | str) -> Path:
    return Path(f"{artefact}{PROVENANCE}")


def write_provenance(snakemake: Any, started: float, *, gpus: int) -> None:
    """The record of a job that ends now, beside its first output."""
    slots, per_gpu = gpu_slots(snakemake.resources)
    record = {
        "rule": snakemake.rule,
        "wildcards": dict(snakemake.wildcards.items()),
        "params": params_digest(snakemake.params),
        "code": snakemake.params.code,
        "inputs": sorted({*snakemake.input}),
        "commit": commit(),
        "versions": package_versions(),
        "machine": platform.node(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "gpus": gpu_names(gpus),
        "gpu_share": min(1.0, slots / per_gpu),  # of each, that the job had
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "threads": snakemake.threads,
        "peak_mib": round(peak_mib()),
        "gpu_peak_mib": round(gpu_peak_mib()),
        "asked": {name: snakemake.resources.get(name) for name in ("mem_mb", "runtime")},
    }
    write_json(provenance_path(snakemake.output[0]), record)


def params_digest(params: Any) -> str:
    """The digest of a job's parameters: its code, and all settings that count for its rule."""
    return digest(repr(sorted(params.items())))


def check_plan(dag: Any) -> None:
    """An error that lists stale results, with the command that makes them again; or one if the
    rerun trigger `code` is on."""
    from snakemake.exceptions import WorkflowError
    from snakemake.settings.types import RerunTrigger

    if RerunTrigger.CODE in dag.workflow.rerun_triggers:
        raise WorkflowError(
            "the rerun trigger `code` compares the times of scripts, and would make models again "
            "that nothing changed of: give `--rerun-triggers mtime input params software-env`, or "
            "put that into your --workflow-profile, which stands in for profiles/default"
        )
    stale = stale_results(dag)
    if not stale or dag.workflow.touch:
        return
    made = Counter(job.rule.name for job in dag.jobs)
    again: list[str] = []
    for rule, files in stale.items():
        again += [rule] if len(files) == made[rule] else files
    dry = ("-n", "--dry-run", "--dryrun")
    command = ["snakemake", *(word for word in sys.argv[1:] if word not in dry), "--forcerun"]
    lines = [f"  {file}" for files in stale.values() for file in files]
    raise WorkflowError(
        f"{len(lines)} results were made with other settings or code than their rules have now, "
        "and Snakemake has no record that would tell it:\n" + "\n".join(lines) + "\n"
        f"This makes them again, and all that hangs on them:\n  {shlex.join([*command, *again])}\n"
        "With --touch added it keeps them as they are."
    )


def stale_results(dag: Any) -> dict[str, list[str]]:
    """By rule, the results that Snakemake would keep because it has no record of them (it was
    deleted, or they come from elsewhere), and that were made with other parameters."""
    stale: dict[str, list[str]] = {}
    for job in dag.jobs:
        if not dag.needrun(job) and dag.reason(job).no_metadata and job.output:
            record = provenance_path(job.output[0])
            if record.is_file() and read_json(record)["params"] != params_digest(job.params):
                stale.setdefault(job.rule.name, []).append(str(job.output[0]))
    return stale


def peak_mib() -> float:
    """The most memory that this process, or one it waited for, has had. Of a job that `preload`
    runs, Snakemake sees the client alone."""
    usages = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(usage).ru_maxrss for usage in usages) / 1024


def gpu_peak_mib() -> float:
    """The most memory that this process has held of a GPU, what torch kept for later included; 0
    where others did the work (flame, cells that are timed)."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    devices = range(torch.cuda.device_count())
    return max(torch.cuda.max_memory_reserved(device) for device in devices) / 2**20


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # a rule's own environment holds only what it needs
    return versions


def gpu_names(count: int) -> list[str]:
    """What the GPUs that a job may use are called."""
    if not count:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(count)]


def commit() -> str | None:
    """The commit of the checkout, with a plus sign if files were changed since."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or no checkout: a release's archive has neither
