"""Work in a process of its own, with a time limit.

The work is a generator: what it yields is kept, also when it fails or hangs later on. A process
can be started ahead of its work, so that its imports are done by the time there is some.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Which kernels run is part of a timing. fla hands calls to other backends where they are installed
# or switched on; these keep all of them to Triton. Tuning results are kept on disk.
FIXED = {
    "FLA_DISABLE_BACKEND_DISPATCH": "1",
    "FLA_FLASH_QLA": "0",
    "FLA_TILELANG": "0",
    "FLA_GLUON": "0",
    "FLA_INTRACARD_CP": "0",
    "FLA_CONV_BACKEND": "triton",
    "FLA_CACHE_MODE": "disabled",
    "FLA_CACHE_RESULTS": "1",
}

HEAVY = (
    "reproduction.benchmarking.passes",
    "reproduction.benchmarking.decoding",
    "fla.layers",
    "fla.models",
)

READY = b"!"  # what a process says once it has imported all it will need


class NotMeasured(Exception):
    """Work that ends without a result for a reason worth writing down."""


@dataclass(frozen=True)
class Outcome:
    """What the work yielded, why it ended early if it did, and how long it took."""

    values: list[Any]
    reason: str
    seconds: float


Work = Callable[..., Iterator[Any]]


def own_process_by_default() -> bool:
    """A GPU can be poisoned by a crash; without one, imports would cost more than the work."""
    import torch

    return torch.cuda.is_available()


def run_work(
    work: Work,
    *arguments: Any,
    limit_s: float,
    own_process: bool | None = None,
    worker: Worker | None = None,
) -> Outcome:
    """In a process of its own, or in this one, without a limit."""
    if own_process_by_default() if own_process is None else own_process:
        return (worker or Worker(())).run(work, *arguments, limit_s=limit_s)
    values, reason, started = [], "", time.monotonic()
    try:
        for value in work(*arguments):
            values.append(value)
    except Exception as error:
        reason = in_one_line(error)
    return Outcome(values, reason, time.monotonic() - started)


class Worker:
    """A process that imports what it will need and waits for its work. It does one thing."""

    def __init__(self, preload: tuple[str, ...] = HEAVY):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "statecut.preflight.child", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **FIXED},
            start_new_session=True,  # so that the limit ends its compilers too
        )
        self.ready = b""

    def wait(self) -> None:
        """Wait until its imports are done: nothing else may run during a timing."""
        assert self.process.stdout is not None
        self.ready = self.ready or self.process.stdout.read(len(READY))

    def run(self, work: Work, *arguments: Any, limit_s: float) -> Outcome:
        started = time.monotonic()
        reason = ""
        try:
            request = pickle.dumps((work, arguments))
            out, err = self.process.communicate(request, timeout=limit_s)
        except subprocess.TimeoutExpired:
            reason = f"no result within {limit_s:g} s"
            self.close()
            out, err = self.process.communicate()
        finally:
            self.close()
        values, end = _read((self.ready + out).removeprefix(READY))
        if not reason and end is None:
            reason = _death(self.process.returncode, err)
        return Outcome(values, reason or end or "", time.monotonic() - started)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def in_one_line(error: BaseException) -> str:
    if isinstance(error, NotMeasured):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def _read(out: bytes) -> tuple[list[Any], str | None]:
    """What was yielded, and how it ended: None if the process died before it could say so."""
    stream = io.BytesIO(out)
    values: list[Any] = []
    while True:
        try:
            kind, value = pickle.load(stream)
        except (EOFError, pickle.UnpicklingError):
            return values, None
        if kind == "end":
            return values, value
        values.append(value)


def _death(code: int, err: bytes) -> str:
    if code == -signal.SIGKILL:
        return "killed from outside, as the system does when memory runs out"
    last = (err.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the process died ({how}): {last}"
