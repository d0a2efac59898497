"""Work in a process of its own, with a time limit: a kernel that crashes poisons its CUDA context.

The work is a generator: what it yields is kept, also when it fails or hangs later on.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# Which kernels run is part of a timing: fla's other backends are off, tuning results are kept.
OFF = ("FLA_FLASH_QLA", "FLA_TILELANG", "FLA_GLUON", "FLA_INTRACARD_CP")
FIXED = dict.fromkeys(OFF, "0") | {
    "FLA_DISABLE_BACKEND_DISPATCH": "1",
    "FLA_CONV_BACKEND": "triton",
    "FLA_CACHE_MODE": "disabled",
    "FLA_CACHE_RESULTS": "1",
}
PR_SET_PDEATHSIG = 1

Work = Callable[..., Iterator[Any]]


class NotMeasured(Exception):
    """Work that ends without a result for a reason worth writing down."""


@dataclass(frozen=True)
class Outcome:
    values: list[Any]
    reason: str  # why it ended early, if it did
    seconds: float


def run_work(
    work: Work,
    *arguments: Any,
    limit_s: float,
    own_process: bool,
    opened: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Outcome:
    """In a process of its own, which `opened` is told of, or in this one, without a limit."""
    started, late = time.monotonic(), ""
    if not own_process:
        *steps, (reason, _) = _steps(work, arguments)
        return Outcome([value for _, value in steps], str(reason), time.monotonic() - started)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import {__name__} as process; process.serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | FIXED,
        start_new_session=True,  # so that the limit ends its compilers too
    )
    try:
        opened(process)
        out, err = process.communicate(pickle.dumps((work, arguments)), timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = f"no result within {limit_s:g} s"
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    finally:
        end(process)
    stream, found = io.BytesIO(out), []
    with suppress(EOFError, pickle.UnpicklingError):  # a process that died has not said how
        while True:
            found.append(pickle.load(stream))
    reasons = [reason for reason, _ in found if reason is not None]
    death = _death(process.returncode, err)
    values = [value for reason, value in found if reason is None]
    return Outcome(values, late or [*reasons, death][0], time.monotonic() - started)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_one_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return (
        line if isinstance(error, NotMeasured) else f"{type(error).__name__}: {line}".rstrip(": ")
    )


def _steps(work: Work, arguments: tuple[Any, ...]) -> Iterator[tuple[str | None, Any]]:
    """What the work yields, then the reason why it ended, empty if it is done."""
    reason = ""
    try:
        for value in work(*arguments):
            yield None, value
    except Exception as error:
        reason = in_one_line(error)
    yield reason, None


def _death(code: int, err: bytes) -> str:
    if code == -signal.SIGKILL:
        return "killed from outside, as the system does when memory runs out"
    last = (err.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    return f"the process died ({f'signal {-code}' if code < 0 else f'exit code {code}'}): {last}"


def serve() -> None:
    """The other side of `run_work`."""
    # If the job is killed, so is this process: it would disturb whatever is timed next.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the results
    for step in _steps(*pickle.load(sys.stdin.buffer)):
        pickle.dump(step, results)
        results.flush()
    os._exit(0)  # a poisoned CUDA context may hang in its destructors
