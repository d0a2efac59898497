"""Jobs that are handed over run as they would have by themselves."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keycut import forkserver

JOB = """
import os, sys, time
from keycut import forkserver
forkserver.hand_over()
{body}
"""


@pytest.fixture
def served(tmp_path):
    """Run commands beside a server that has less to import."""
    small = tmp_path / "small.py"
    small.write_text(
        "import sys\nfrom keycut import forkserver\n"
        "forkserver.LIBRARIES = ('colorsys', 'torch')\nforkserver.main(sys.argv[1:])\n"
    )

    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def start(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(small), *command], env=environment,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        )  # fmt: skip

    return start


def job(folder: Path, body: str) -> list[str]:
    script = folder / "job.py"
    script.write_text(JOB.format(body=body))
    return [sys.executable, str(script)]


def test_a_job_runs_in_a_fork_where_the_libraries_are_loaded(served, tmp_path):
    body = "print('colorsys' in sys.modules, os.getcwd(), os.environ['HOME'], file=sys.stderr)"
    running = served(*job(tmp_path, body))
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert err.split() == ["True", str(tmp_path), os.environ["HOME"]]


def test_where_there_is_a_gpu_nothing_touches_it_before_the_fork(tmp_path, monkeypatch):
    monkeypatch.setattr(forkserver, "GPU", tmp_path / "none")
    everything = forkserver.before_the_fork()
    assert {"fla", "fla.models", "torch"} <= {*everything}
    (tmp_path / "one").touch()
    monkeypatch.setattr(forkserver, "GPU", tmp_path / "one")
    assert {*everything} - {*forkserver.before_the_fork()} == {"fla", "fla.models"}


def test_a_job_has_one_thread(served, tmp_path):
    body = (
        "import torch\n(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()\n"
        "print(len(os.listdir('/proc/self/task')), file=sys.stderr)"
    )
    _, err = served(*job(tmp_path, body)).communicate(timeout=60)
    assert err.split() == ["1"]


def test_a_command_that_ends_at_once_leaves_no_trace(served, tmp_path):
    running = served("true")
    assert running.communicate(timeout=60) == ("", "")


def test_without_a_server_the_job_runs_as_it_is(tmp_path):
    done = subprocess.run(job(tmp_path, "print('colorsys' in sys.modules)"), capture_output=True)
    assert done.stdout.split() == [b"False"]


@pytest.mark.parametrize(
    ("work", "limit", "found"),
    [
        ("map, eval, [\"'colorsys' in __import__('sys').modules\"]", 60, "[True] ''"),
        ("map, time.sleep, [0, 1000]", 10, "[None] 'no result within 10 s'"),
        ("map, os._exit, [3]", 60, "[] 'the process died (exit code 3): it said nothing'"),
        ("map, __import__('signal').raise_signal, [11]", 60, "[] 'the process died (signal 11)"),
    ],
)
def test_what_is_timed_apart_is_a_fork_too(served, tmp_path, work, limit, found):
    body = (
        "from keycut.benchmarking.process import apart\n"
        f"outcome = apart({work}, limit_s={limit})\nprint(outcome.found, repr(outcome.reason))"
    )
    out, err = served(*job(tmp_path, body)).communicate(timeout=60)
    assert out.startswith(found), err


def test_what_is_timed_apart_ends_with_its_job(served, tmp_path):
    body = (
        "from keycut.benchmarking.process import apart\n"
        "who = \"open('who', 'w').write(str(__import__('os').getpid()))\"\n"
        "work = [who, \"open('at-work', 'w').close()\", \"__import__('time').sleep(1000)\"]\n"
        "apart(map, eval, work, limit_s=1000)"
    )
    running = served("sh", "-c", f"{' '.join(job(tmp_path, body))} & echo $!; exec sleep 60")
    job_itself = int(running.stdout.readline())
    wait_for(tmp_path / "at-work")
    at_work = forkserver.pidfd(int((tmp_path / "who").read_text()))
    os.kill(job_itself, signal.SIGKILL)
    assert select.select([at_work], [], [], 30)[0] == [at_work]
    running.kill()
    running.communicate()


@pytest.mark.parametrize(
    ("body", "code"),
    [("sys.exit(75)", 75), ("sys.exit('no')", 1), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_the_jobs(served, tmp_path, body, code):
    running = served(*job(tmp_path, body))
    running.communicate(timeout=60)
    assert running.returncode == code


def test_a_job_whose_client_is_killed_is_told_to_end(served, tmp_path):
    body = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w'), os._exit(75)))\n"
        "open('started', 'w')\ntime.sleep(60)"
    )
    running = served(*job(tmp_path, body))
    wait_for(tmp_path / "started")
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=60)
    wait_for(tmp_path / "saved")


def test_a_process_that_is_watched_is_seen_to_end():
    running = subprocess.Popen(["sleep", "60"])
    watched = forkserver.pidfd(running.pid)
    assert not os.get_inheritable(watched)
    assert select.select([watched], [], [], 0)[0] == []
    running.kill()
    assert select.select([watched], [], [], 10)[0] == [watched]
    running.wait()
    with pytest.raises(ProcessLookupError):
        forkserver.pidfd(running.pid)


def test_jobs_run_side_by_side(served, tmp_path):
    command = job(tmp_path, "open(f'here{os.getpid()}', 'w')\nwhile len([f for f in "
                  "os.listdir() if f.startswith('here')]) < 3: time.sleep(0.01)")  # fmt: skip
    running = served("sh", "-c", " & ".join([" ".join(command)] * 3) + " & wait")
    running.communicate(timeout=60)
    assert running.returncode == 0


def test_the_server_ends_with_its_command_and_leaves_nothing(served, tmp_path):
    running = served(sys.executable, "-c", "import os; print(os.environ['KEYCUT_FORK_SERVER'])")
    out, _ = running.communicate(timeout=60)
    address = Path(out.strip())
    for _ in range(500):
        if not address.parent.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{address.parent} is still there")


def wait_for(path: Path) -> None:
    for _ in range(1000):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} never came")
