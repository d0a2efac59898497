"""What stands around the work of every job; job.py says what that is."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from reproduction.config import JobConfig
from reproduction.running.code import SOURCE, KnownCode
from reproduction.running.digests import cached_sha256
from reproduction.running.gpus import gpu_shares, gpus_taken, limit_memory, require_gpus
from reproduction.running.locks import exclusive_lock
from reproduction.running.paths import PROVENANCE, provenance_path
from reproduction.running.provenance import Provenance, params_digest
from reproduction.running.slurm import export_end_time, requeue_at_time_limit
from statecut.errors import InputError
from statecut.files import is_full_disk

logger = logging.getLogger(__name__)


@contextmanager
def job_context(snakemake: Any, *, online: bool = False) -> Iterator[JobConfig]:
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
        config = JobConfig.model_validate(snakemake.params.get("settings", {}))
        check_user_files(snakemake.params.get("user_files", {}))
        # Of the outputs of one job the first has the record, which is an input of its own.
        for path in dict.fromkeys(path.removesuffix(PROVENANCE) for path in snakemake.input):
            check_up_to_date(path, partial=config.partial is not None)
        started = time.time()
        count, shares = gpu_shares(snakemake.resources)
        if config.device == "cpu":
            count = 0
        with gpus_taken(count, shares=shares) as gpus:
            if count:
                require_gpus(snakemake.rule, count, shares=shares)
            if 0 < count < shares:
                limit_memory(count / shares)
            yield config
        if snakemake.output:
            Provenance.of(snakemake, code, gpus, started).write(snakemake.output[0])


def export_library() -> None:
    """Let jobs in a conda environment of their own import the library of this checkout."""
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def share_triton_cache() -> None:
    """Let all jobs of a checkout share the kernels that Triton compiled: each takes minutes."""
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.abspath("results/.triton"))


def exit_if_already_built(snakemake: Any) -> None:
    """Exit if another job has built the same outputs; else remove what it built."""
    outputs = [Path(path) for path in snakemake.output]
    record = Provenance.read(outputs[0]) if all(path.exists() for path in outputs) else None
    if record and record.params == params_digest(snakemake) and record.code.is_current():
        logger.info("another job has built the outputs meanwhile")
        sys.exit(0)
    for path in [*outputs, provenance_path(outputs[0])]:
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


def check_code(snakemake: Any) -> KnownCode:
    """The code of this job, or an error if it is not what the workflow was started with."""
    code = KnownCode(**snakemake.params.code)
    if not code.is_current():
        raise InputError(
            f"the code of rule {snakemake.rule} was changed after this job was planned: "
            "start snakemake again"
        )
    return code.with_modules()


def check_user_files(digests: dict[str, str]) -> None:
    """An error if files that users bring are not what they were when the job was planned."""
    now = cached_sha256(path for path in digests if Path(path).is_file())
    if changed := [path for path, digest in digests.items() if now.get(path) != digest]:
        raise InputError(
            f"{changed[0]} was changed after this job was planned: start snakemake again"
        )


def check_up_to_date(path: Path | str, *, partial: bool = False) -> None:
    """An error if an artefact was made by other code than its rule has now.

    On a cluster a queued job runs the library as it is when the job starts, while Snakemake records
    the code of when it was planned; the provenance has what was really imported. A partial run
    cannot make the artefact again, as its models may be gone: there it is only logged.
    """
    record = Provenance.read(path)
    if record is None or record.code.is_current():
        return
    message = f"{path} was made by other code of rule {record.rule} than there is now"
    if not partial:
        raise InputError(f"{message}: delete it and start snakemake again")
    logger.warning(f"{message}, at commit {record.commit}; the run is partial and keeps it")


@contextmanager
def _redirect_to_log(log: Any) -> Iterator[None]:
    """Send the output of this process and its children to the job's log."""
    if not log:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.dup(1), os.dup(2)
    file = os.open(log[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    except Exception:
        traceback.print_exc()  # the log is where people look
        raise
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, old in zip((1, 2), terminal, strict=True):
                os.dup2(old, number)
                os.close(old)


@contextmanager
def _report_full_disk() -> Iterator[None]:
    """Report a full disk on the terminal: the log may be on that disk."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        sys.exit(
            f"reproduction: {error}: make room and start snakemake again; what was done is kept"
        )


@contextmanager
def _report_input_errors() -> Iterator[None]:
    """Bad input ends a job with its message alone; a fault of ours keeps its traceback."""
    try:
        yield
    except InputError as error:
        print(f"reproduction: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
