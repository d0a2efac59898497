import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from statecut.process import run_work

# Work that any process can import: a generator that maps a function over values.


def test_a_process_of_its_own_yields_what_the_work_yields() -> None:
    for own_process in (True, False):
        work = [1, "two", np.arange(10**5)]
        outcome = run_work(iter, work, limit_s=60, own_process=own_process)
        assert (outcome.values[:2], outcome.reason) == ([1, "two"], "")
        assert (outcome.values[2] == work[2]).all()
    printed = run_work(map, print, ["a", "b"], limit_s=60, own_process=True)
    assert printed.values == [None, None]


@pytest.mark.parametrize(
    ("work", "kept", "reason"),
    [
        ((map, int, ["1", "x"]), [1], "ValueError: invalid literal for int()"),
        ((map, time.sleep, [0, 1000]), [None], "no result within 2 s"),
        ((map, os._exit, [3]), [], "the process died (exit code 3): no message"),
        ((map, signal.raise_signal, [signal.SIGSEGV]), [], "the process died (signal 11)"),
        ((map, signal.raise_signal, [signal.SIGKILL]), [], "killed from outside"),
    ],
)
def test_what_was_found_before_the_end_is_kept(work: tuple, kept: list, reason: str) -> None:
    outcome = run_work(*work, limit_s=2 if "within" in reason else 60, own_process=True)
    assert outcome.values == kept
    assert outcome.reason.startswith(reason)


def test_work_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    work = "import os, time; print(os.getpid(), file=open('pid', 'w')); time.sleep(1000)"
    code = (
        "from statecut.process import run_work\n"
        f"run_work(map, exec, [{work!r}], limit_s=1000, own_process=True)"
    )
    job = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    while not (pid := tmp_path / "pid").exists() or not pid.read_text():
        time.sleep(0.1)
    at_work = os.pidfd_open(int(pid.read_text()))
    assert select.select([at_work], [], [], 0)[0] == []
    job.kill()
    job.wait()
    assert select.select([at_work], [], [], 30)[0] == [at_work]
