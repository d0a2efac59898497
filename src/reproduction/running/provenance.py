"""Where an output came from: a record beside it, written last."""

from __future__ import annotations

import csv
import os
import platform
import resource
import subprocess
import time
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from reproduction.running.code import KnownCode
from reproduction.running.gpus import gpu_shares
from reproduction.running.paths import PROVENANCE, provenance_path
from statecut.files import digest, read_json, write_json

PACKAGES = (
    "torch", "triton", "flash-linear-attention", "transformers", "peft", "lm-eval", "datasets",
    "numpy", "scipy", "pandas", "matplotlib", "snakemake", "flame", "torchtitan",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What has a default is missing in records of older versions."""

    rule: str
    wildcards: dict[str, str]
    params: str = ""  # the digest of all parameters
    inputs: list[str]
    code: KnownCode
    commit: str | None
    versions: dict[str, str]  # of packages
    machine: str
    slurm_job: str | None
    gpus: list[str]
    gpu_share: float = 1.0  # of each, that the job had
    started: str
    seconds: float
    threads: int
    peak_mib: int = 0

    @classmethod
    def of(cls, snakemake: Any, code: KnownCode, gpus: list[str], started: float) -> Provenance:
        """The record of a job that ends now."""
        shares_asked, shares = gpu_shares(snakemake.resources)
        return cls(
            rule=snakemake.rule,
            wildcards=dict(snakemake.wildcards.items()),
            params=params_digest(snakemake),
            inputs=sorted({path for path in snakemake.input if not path.endswith(PROVENANCE)}),
            code=code,
            commit=commit(),
            versions=package_versions(),
            machine=platform.node(),
            slurm_job=os.environ.get("SLURM_JOB_ID"),
            gpus=gpu_names(len(gpus)),
            gpu_share=min(1.0, shares_asked / shares),
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            seconds=round(time.time() - started, 3),
            threads=snakemake.threads,
            peak_mib=round(peak_mib()),
        )

    @classmethod
    def read(cls, output: Path | str) -> Provenance | None:
        """The record beside an output, if there is one. Older ones had fields that are gone."""
        path = provenance_path(output)
        if not path.is_file():
            return None
        record = read_json(path)
        record["code"] = KnownCode(**known_fields(KnownCode, record["code"]))
        return cls(**known_fields(cls, record))

    def write(self, output: Path | str) -> None:
        write_json(provenance_path(output), {**vars(self), "code": self.code.to_json()})


def known_fields(kind: Any, record: dict[str, Any]) -> dict[str, Any]:
    return {field.name: record[field.name] for field in fields(kind) if field.name in record}


def read_timing(path: Path | str) -> list[dict[str, str]]:
    """The lines of what Snakemake's `benchmark` writes about a job. With `benchmark-extended` the
    job's parameters are among them, longer than csv takes a field to be."""
    csv.field_size_limit(2**31 - 1)
    with open(path, newline="") as file:
        return [*csv.DictReader(file, delimiter="\t")]


def params_digest(snakemake: Any) -> str:
    """The digest of a job's parameters, with all settings that count for its rule."""
    return digest(repr(sorted(snakemake.params.items())))


def peak_mib() -> float:
    """The most memory that this process, or one it waited for, has had. Of a job that a fork server
    runs, Snakemake sees the client alone; in a process that stays for other jobs it is that of the
    largest so far."""
    usages = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(usage).ru_maxrss for usage in usages) / 1024


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

    return [torch.cuda.get_device_name(i) for i in range(min(count, torch.cuda.device_count()))]


def commit() -> str | None:
    """The commit of the checkout, with a plus sign if files were changed since."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or no checkout: a release's archive has neither
    return described.stdout.strip()
