"""What every job of the workflow does around its work.

    with job(snakemake) as run:
        from keycut.something import work
        work(run.section, snakemake.input.thing, snakemake.output.thing)

`run` holds the sections of the configuration that the rule passes in its parameter `settings`; a
script knows nothing else of it. Around the block:

- output goes to the job's log, and the hub is switched off;
- no other job works on the same outputs at the same time, and what a killed one left is removed;
- code, user files and inputs are checked to be those that the job was planned with;
- GPUs are shared out, and a job ends at once if torch cannot use those that its rule asks for;
- a Slurm job whose time is up is requeued;
- the provenance of the first output is written beside it.

Imports stand inside the block, so that a fork server can take the job over before them.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from keycut.artefact import cached_sha256, digest, is_full_disk, read_json, write_json
from keycut.config import JobConfig
from keycut.errors import InputError
from keycut.running import forkserver
from keycut.running.code import SOURCE, Code, code_now, same_code
from keycut.running.gpus import gpus_taken, limit_memory, require_gpus
from keycut.running.locks import exclusive_lock
from keycut.running.paths import PROVENANCE
from keycut.running.slurm import export_end_time, requeue_at_time_limit

VERSIONED = (
    "torch", "triton", "flash-linear-attention", "transformers", "peft", "lm-eval", "datasets",
    "numpy", "scipy", "pandas", "matplotlib", "snakemake", "flame", "torchtitan",
)  # fmt: skip


@contextmanager
def job(snakemake: Any, *, online: bool = False) -> Iterator[JobConfig]:
    """Around the work of a rule's script."""
    if snakemake.threads == 1:
        forkserver.hand_over()
    os.environ["TOKENIZERS_PARALLELISM"] = "0"
    # On Arm, torch's oneDNN would leave a /tmp/perf-PID.map of its kernels behind.
    os.environ["ONEDNN_JIT_PROFILE"] = "0"
    if not online:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ["OMP_NUM_THREADS"] = str(snakemake.threads)
    share_triton_cache()
    export_end_time()
    with (
        exclusive_lock(snakemake.output) as waited,
        _report_full_disk(),
        _redirect_to_log(snakemake.log),
        requeue_at_time_limit(snakemake.rule),
        _report_input_errors(),
    ):
        code = check_code(snakemake)
        if waited:
            exit_if_already_built(snakemake)
        remove_unfinished(snakemake.output)
        run = JobConfig.model_validate(snakemake.params.get("settings", {}))
        check_user_files(snakemake.params.get("user_files", {}))
        for path in snakemake.input:
            check_up_to_date(path, partial=run.partial is not None)
        started = time.time()
        asked, shares = gpu_shares(snakemake.resources)
        if run.device == "cpu":
            asked = 0
        with gpus_taken(asked, shares=shares) as gpus:
            if asked:
                require_gpus(snakemake.rule, asked, shares=shares)
            if 0 < asked < shares:
                limit_memory(asked / shares)
            yield run
        if snakemake.output:
            beside = Path(f"{snakemake.output[0]}{PROVENANCE}")
            write_json(beside, provenance(snakemake, code, gpus, started))


def gpu_shares(resources: Any) -> tuple[int, int]:
    """How many shares of GPUs a rule asked for, and how many the profile cuts each GPU into."""
    return int(resources.get("gpu", 0)), int(resources.get("gpu_shares", 1))


def export_library() -> None:
    """Let jobs in a conda environment of their own import the library of this checkout."""
    paths = [str(SOURCE.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def share_triton_cache() -> None:
    """Let all jobs of a checkout share the kernels that Triton compiled: each takes minutes."""
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.abspath("results/.triton"))


def exit_if_already_built(snakemake: Any) -> None:
    """End well if another job has made just what this one is to make; else remove what it made."""
    outputs = [Path(path) for path in snakemake.output]
    beside = Path(f"{snakemake.output[0]}{PROVENANCE}")  # written last
    if beside.is_file() and all(path.exists() for path in outputs):
        found = read_json(beside)
        if found.get("params") == params_digest(snakemake) and same_code(found["code"]):
            print("keycut: another job has made it meanwhile", file=sys.stderr, flush=True)
            sys.exit(0)
    for path in [*outputs, beside]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_unfinished(outputs: Iterable[str]) -> None:
    """Remove what killed jobs were writing. `artefact.atomic_write` writes to a folder beside the
    output, named after it, with eight random characters."""
    for path in map(Path, outputs):
        for folder in path.parent.glob(f".{escape(path.name)}.{'?' * 8}"):
            shutil.rmtree(folder)


def params_digest(snakemake: Any) -> str:
    """What a job's parameters are. Of the configuration they are all that counts for its rule."""
    return digest(repr(sorted(snakemake.params.items())))


def check_code(snakemake: Any) -> Code:
    """The code of this job, or an error if it is not what the workflow was started with."""
    if not same_code(snakemake.params.code):
        raise InputError(
            f"the code of rule {snakemake.rule} was changed after this job was planned: "
            "start snakemake again"
        )
    return code_now(snakemake.params.code)


def check_user_files(user_files: dict[str, str]) -> None:
    """An error if files that users bring are not what they were when the job was planned."""
    now = cached_sha256(user_files)
    if other := [path for path, known in user_files.items() if now[path] != known]:
        raise InputError(
            f"{other[0]} was changed after this job was planned: start snakemake again"
        )


def check_up_to_date(path: Path | str, *, partial: bool = False) -> None:
    """An error if an artefact was made by other code than its rule has now.

    On a cluster a queued job runs whatever the library is when it starts, while Snakemake notes
    the code of when it was planned: so what was really imported stands beside the artefact.
    A partial run cannot make it again, as its models may be gone: there it is only said.
    """
    beside = Path(f"{path}{PROVENANCE}")
    if not beside.is_file():
        return
    found = read_json(beside)
    if same_code(found["code"]):
        return
    said = f"{path} was made by other code of rule {found['rule']} than there is now"
    if not partial:
        raise InputError(f"{said}: delete it and start snakemake again")
    print(f"keycut: {said}, at commit {found['commit']}; the run is partial and keeps it",
          file=sys.stderr, flush=True)  # fmt: skip


def provenance(snakemake: Any, code: Code, gpus: list[str], started: float) -> dict[str, Any]:
    """Where an output came from."""
    asked, shares = gpu_shares(snakemake.resources)
    return {
        "rule": snakemake.rule,
        "wildcards": dict(snakemake.wildcards.items()),
        "params": params_digest(snakemake),
        "inputs": sorted({path for path in snakemake.input if not path.endswith(PROVENANCE)}),
        "code": {**snakemake.params.code, "digest": code.digest, "modules": list(code.modules)},
        "commit": commit(),
        "versions": versions(),
        "machine": platform.node(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "gpus": gpu_names(len(gpus)),
        "gpu_share": min(1.0, asked / shares),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "threads": snakemake.threads,
        "peak_mib": round(peak_mib()),
    }


def peak_mib() -> float:
    """The most memory that this process, or one it waited for, has had. Of a job that a fork server
    runs, Snakemake sees the client alone."""
    usages = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(usage).ru_maxrss for usage in usages) / 1024


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # a rule's own environment holds only what it needs
    return found


def gpu_names(count: int) -> list[str]:
    """What the GPUs that a job may use are called."""
    if not count:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(min(count, torch.cuda.device_count()))]


def commit() -> str | None:
    """The commit of the checkout, with a plus sign if files were changed since."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or no checkout: a release's archive has neither
    return said.stdout.strip()


@contextmanager
def _redirect_to_log(log: Any) -> Iterator[None]:
    """Send what this process and its children say to the job's log."""
    if not log:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    file = os.open(log[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


@contextmanager
def _report_full_disk() -> Iterator[None]:
    """A full disk is said on the terminal: the log may be on that disk."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        sys.exit(f"keycut: {error}: make room and start snakemake again; what was done is kept")


@contextmanager
def _report_input_errors() -> Iterator[None]:
    """Bad input ends a job with its message alone; a fault of ours keeps its traceback."""
    try:
        yield
    except InputError as error:
        print(f"keycut: {error}", file=sys.stderr)
        sys.stderr.flush()
        sys.exit(2)
