"""What every job of the workflow does around its work.

    with job(snakemake) as run:
        from statecut.something import work
        work(run.section, snakemake.input.thing, snakemake.output.thing)

`run` holds the sections of the configuration that the rule passes in its parameter `settings`.
Around the block:

- output goes to the job's log, and the hub is switched off;
- the code is checked to be what the job was planned with;
- GPUs are taken, and a job fails if torch cannot use those that its rule asks for;
- a Slurm job whose time is up is requeued;
- the provenance of the first output is written beside it.

Imports stand inside the block, so that `preload` can take the job over before them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.running import preload
from statecut import logs
from statecut.errors import InputError

if TYPE_CHECKING:
    from reproduction.config import JobConfig


@contextmanager
def job(snakemake: Any) -> Iterator[JobConfig]:
    logs.start("reproduction")
    # On one machine a job is told to end with the snakemake that started it, even a killed one; a
    # fork ends with its client (`preload.end_with`).
    if os.environ.get(preload.SOCKET) != preload.FORKED:
        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGTERM))  # PR_SET_PDEATHSIG
    if snakemake.threads == 1:  # jobs in forks run with one thread
        preload.hand_over()
    from reproduction.config import JobConfig
    from reproduction.running.code import check_code
    from reproduction.running.gpus import gpu_slots, gpus_taken, require_gpus
    from reproduction.running.provenance import provenance_path, write_provenance
    from reproduction.running.slurm import export_end_time, requeue_at_time_limit

    os.environ["TOKENIZERS_PARALLELISM"] = "0"
    # On Arm, torch's oneDNN would leave a /tmp/perf-PID.map of its kernels behind.
    os.environ["ONEDNN_JIT_PROFILE"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(snakemake.threads)
    # All jobs of a checkout share the kernels that Triton compiled: each takes minutes.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.abspath("results/.triton"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    export_end_time()
    with (
        _report_errors(),
        _redirect_to_log(snakemake.log[0]),
        requeue_at_time_limit(snakemake.rule),
    ):
        started = time.time()
        check_code(snakemake.rule, snakemake.params.code)
        provenance_path(snakemake.output[0]).unlink(missing_ok=True)
        remove_unfinished(snakemake.output)
        config = JobConfig.model_validate(snakemake.params.get("settings", {}))
        slots, per_gpu = gpu_slots(snakemake.resources) if config.device == "cuda" else (0, 1)
        gpus = -(-slots // per_gpu)
        with gpus_taken(slots, per_gpu=per_gpu):
            require_gpus(snakemake.rule, gpus)
            yield config
        write_provenance(snakemake, started, gpus=gpus)


def remove_unfinished(outputs: Iterable[str]) -> None:
    """Remove what killed jobs were writing: `files.atomic_write` writes to a folder beside the
    output, named after it, with eight random characters."""
    for path in map(Path, outputs):
        for folder in path.parent.glob(f".{escape(path.name)}.{'?' * 8}"):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _redirect_to_log(log: str) -> Iterator[None]:
    """Send the output of this process and its children to the job's log. It is never empty: behind
    an empty one Snakemake shows no other log, such as Slurm's."""
    terminal = os.dup(1), os.dup(2)
    with open(log, "wb") as file:
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
        file.flush()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    except InputError as error:
        print(f"reproduction: {error}", file=sys.stderr)
        raise
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
def _report_errors() -> Iterator[None]:
    """Bad input and a full disk, where the log may be, end a job with their message alone; any
    other error keeps its traceback."""
    from statecut.files import is_full_disk

    try:
        yield
    except InputError as error:
        sys.exit(f"reproduction: {error}")
    except Exception as error:
        if not is_full_disk(error):
            raise
        sys.exit(
            f"reproduction: {error}: make room and start snakemake again; what was done is kept"
        )
