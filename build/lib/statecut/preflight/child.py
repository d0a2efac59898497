"""The other side of `process.Worker`: import, wait for work, do it, send the results."""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import sys
import threading

from reproduction.running.forkserver import pidfd
from statecut.preflight.process import READY, in_one_line


def serve(preload: list[str]) -> None:
    # What libraries print must not get between the results.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for module in preload:
        importlib.import_module(module)
    results.write(READY)
    results.flush()
    request = sys.stdin.buffer.read()
    if not request:  # closed before there was any work
        os._exit(0)
    reason = ""
    try:
        work, arguments = pickle.loads(request)
        for value in work(*arguments):
            pickle.dump(("value", value), results)
            results.flush()
    except Exception as error:
        reason = in_one_line(error)
    pickle.dump(("end", reason), results)
    results.flush()
    # A poisoned CUDA context may hang in its destructors.
    os._exit(0)


def end_with_parent() -> None:
    """If the job is killed, so is this process: it would disturb whatever is timed next."""
    parent = pidfd(os.getppid())

    def watch() -> None:
        select.select([parent], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    serve(sys.argv[1:])
