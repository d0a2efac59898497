import os
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from reproduction.running.forkserver import pidfd
from statecut.process import Outcome, Worker, run_work

# Work that any process can import: a generator that maps a function over values.


def test_a_process_of_its_own_yields_what_the_work_yields() -> None:
    for own_process in (True, False):
        outcome = run_work(iter, [1, "two"], limit_s=60, own_process=own_process)
        assert (outcome.values, outcome.reason) == ([1, "two"], "")


@pytest.mark.parametrize(
    ("work", "kept", "reason"),
    [
        ((map, int, ["1", "x"]), [1], "ValueError: invalid literal for int()"),
        ((map, time.sleep, [0, 1000]), [None], "no result within 5 s"),
        ((map, os._exit, [3]), [], "the process died (exit code 3): no message"),
        ((map, signal.raise_signal, [signal.SIGSEGV]), [], "the process died (signal 11)"),
        ((map, signal.raise_signal, [signal.SIGKILL]), [], "killed from outside"),
    ],
)
def test_what_was_found_before_the_end_is_kept(work: tuple, kept: list, reason: str) -> None:
    outcome: Outcome = run_work(*work, limit_s=5, own_process=True)
    assert outcome.values == kept
    assert outcome.reason.startswith(reason)


def test_a_process_started_ahead_can_be_closed_without_work() -> None:
    worker = Worker()
    worker.close()
    assert worker.process.returncode == -signal.SIGKILL


def test_a_process_that_was_waited_for_has_imported_and_works_as_any() -> None:
    worker = Worker("colorsys")
    worker.wait()
    worker.wait()
    loaded = "'colorsys' in __import__('sys').modules"
    assert worker.run(map, eval, [loaded], limit_s=60).values == [True]


def test_a_process_that_cannot_import_says_so() -> None:
    worker = Worker("no_such_module")
    worker.wait()
    assert "no_such_module" in worker.run(iter, [1], limit_s=60).reason


def test_work_ends_with_the_process_that_waits_for_it() -> None:
    code = (
        "import time\nfrom statecut.process import Worker\n"
        "worker = Worker()\nworker.wait()\nprint(worker.process.pid, flush=True)\n"
        "worker.run(map, time.sleep, [1000], limit_s=1000)"
    )
    job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert job.stdout is not None
    at_work = pidfd(int(job.stdout.readline()))
    time.sleep(1)  # it has its work by now
    assert select.select([at_work], [], [], 0)[0] == []
    job.kill()
    job.wait()
    assert select.select([at_work], [], [], 30)[0] == [at_work]


def test_prints_of_the_work_do_not_get_between_its_results() -> None:
    assert run_work(map, print, ["a", "b"], limit_s=60, own_process=True).values == [None, None]


def test_arrays_come_back_whole() -> None:
    found = run_work(iter, [np.arange(10**5)], limit_s=60, own_process=True).values[0]
    assert (found == np.arange(10**5)).all()
