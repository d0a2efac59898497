"""Jobs that are handed over run as they would have by themselves."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from keycut.running import forkserver

JOB = """
import os, sys, time
from keycut.running import forkserver
forkserver.hand_over()
{body}
"""


# What training does when it is told to stop: it takes a moment to save.
SAVES = """
import signal
def save(*_):
    time.sleep(0.5)
    open('saved', 'w').close()
    os._exit(75)
signal.signal(signal.SIGTERM, save)
open('started', 'w').close()
time.sleep(60)
"""

LOADED = "print('colorsys' in sys.modules)"


@pytest.fixture
def served(tmp_path):
    """Run commands beside a server that has less to import."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def start(*command: str, libraries: tuple[str, ...] = ("colorsys",)) -> subprocess.Popen[str]:
        small = tmp_path / "small.py"
        small.write_text(
            "import sys\nfrom keycut.running import forkserver\n"
            f"forkserver.LIBRARIES = {libraries}\nforkserver.main(sys.argv[1:])\n"
        )
        return subprocess.Popen(
            [sys.executable, str(small), *command], cwd=tmp_path,
            env={**environment, "TMPDIR": str(temporary)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    yield start
    assert not list(temporary.iterdir())


@pytest.fixture
def name(served):
    """The name of a server whose command goes on until the test ends, and the server with it."""
    running = served("sh", "-c", "echo $KEYCUT_FORK_SERVER; exec sleep 60")
    yield running.stdout.readline().strip()
    (server,) = children(running.pid)
    with ends_soon(server):
        running.kill()
    assert running.communicate() == ("", "")


def children(process: int) -> list[int]:
    """The processes that a process has forked, first the server where it is the command."""
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@contextmanager
def ends_soon(*processes: int):
    watched = [forkserver.pidfd(process) for process in processes]
    yield
    for file in watched:
        assert select.select([file], [], [], 30)[0] == [file]
        os.close(file)


def handed_over(folder: Path, name: str, body: str = LOADED) -> subprocess.CompletedProcess[str]:
    """A job that finds the server of this name."""
    return subprocess.run(
        job(folder, body), env={**os.environ, "KEYCUT_FORK_SERVER": name}, cwd=folder,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


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
    running = served(*job(tmp_path, body), libraries=("torch",))
    assert running.communicate(timeout=60)[1].split() == ["1"]


def test_a_command_that_ends_at_once_leaves_no_trace(served, tmp_path):
    running = served("true")
    assert running.communicate(timeout=60) == ("", "")


def test_without_a_server_the_job_runs_as_it_is(tmp_path):
    done = subprocess.run(job(tmp_path, "print('colorsys' in sys.modules)"), capture_output=True)
    assert done.stdout.split() == [b"False"]


def test_what_is_timed_apart_is_a_fresh_process(served, tmp_path):
    body = (
        "from keycut.benchmarking.process import run_work\n"
        "loaded = \"'colorsys' in __import__('sys').modules\"\n"
        f"{LOADED}\nprint(run_work(map, eval, [loaded], limit_s=60, own_process=True).values)"
    )
    out, err = served(*job(tmp_path, body)).communicate(timeout=60)
    assert out.split() == ["True", "[False]"], err


def test_what_is_timed_apart_ends_with_its_job(served, tmp_path):
    body = (
        "from keycut.benchmarking.process import run_work\n"
        "who = \"open('who', 'w').write(str(__import__('os').getpid()))\"\n"
        "work = [who, \"open('at-work', 'w').close()\", \"__import__('time').sleep(1000)\"]\n"
        "run_work(map, eval, work, limit_s=1000, own_process=True)"
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


def test_a_job_whose_client_is_killed_saves_and_ends(served, tmp_path):
    running = served("sh", "-c", f"{' '.join(job(tmp_path, SAVES))} & echo $!; exec sleep 60")
    client = int(running.stdout.readline())
    wait_for(tmp_path / "started")
    os.kill(client, signal.SIGKILL)
    wait_for(tmp_path / "saved")
    with ends_soon(*children(running.pid)):
        running.kill()
    running.communicate()


def test_a_job_whose_command_is_killed_saves_and_ends_and_so_do_its_client_and_the_server(
    served, tmp_path
):
    running = served("sh", "-c", f"{' '.join(job(tmp_path, SAVES))} & exec sleep 60")
    wait_for(tmp_path / "started")
    with ends_soon(*children(running.pid)):
        running.kill()
    running.communicate(timeout=60)  # until the last of them has closed its output
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_client_that_is_told_to_end_waits_until_its_job_has_saved(served, tmp_path, number):
    client = served(*job(tmp_path, SAVES))
    wait_for(tmp_path / "started")
    client.send_signal(number)
    assert client.wait(60) == 75
    assert (tmp_path / "saved").exists()
    assert client.communicate() == ("", "")


def test_a_client_waits_for_its_job_also_if_nobody_can_tell_it_of_the_end(served, tmp_path):
    client = served(*job(tmp_path, SAVES))
    wait_for(tmp_path / "started")
    (server,) = children(client.pid)
    (supervisor,) = children(server)
    os.kill(supervisor, signal.SIGKILL)
    assert client.wait(60) == 1
    assert (tmp_path / "saved").exists()
    assert "the supervisor of this job was killed" in client.communicate()[1]


def test_a_job_goes_on_to_its_end_when_the_server_is_killed(served, tmp_path):
    body = (
        "open('started', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "sys.exit(7)"
    )
    client = served(*job(tmp_path, body))
    wait_for(tmp_path / "started")
    (server,) = children(client.pid)
    os.kill(server, signal.SIGKILL)
    time.sleep(0.2)
    assert client.poll() is None
    (tmp_path / "go").touch()
    assert client.wait(60) == 7
    assert client.communicate() == ("", "")


def test_a_job_that_finds_no_server_any_more_runs_as_it_is_and_says_so(served, tmp_path):
    running = served("sh", "-c", "echo $KEYCUT_FORK_SERVER; exec sleep 60")
    name = running.stdout.readline().strip()
    (server,) = children(running.pid)
    os.kill(server, signal.SIGKILL)
    done = handed_over(tmp_path, name)
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert "no fork server" in done.stderr
    running.kill()
    running.communicate()


REQUEST = {"script": "/no/such/file", "arguments": [], "folder": "/", "environment": {}}


@pytest.mark.parametrize(
    "message",
    [None, b"", b"+", b'+{"script":', b"+no JSON\n", b"+" + json.dumps(REQUEST).encode() + b"\n"],
    ids=["silent", "nothing", "one byte", "half a message", "no message", "whole"],
)
def test_a_client_that_goes_early_or_stays_silent_harms_nobody(tmp_path, name, message):
    with socket.socket(socket.AF_UNIX) as silent, Path(os.devnull).open("r+") as null:
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"\0{name}")
                if message:
                    socket.send_fds(client, [message], [null.fileno()] * 3)
        if message is None:
            silent.connect(f"\0{name}")
        done = handed_over(tmp_path, name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_other_users_are_refused_on_both_sides(tmp_path, monkeypatch):
    here, there = socket.socketpair()
    with here, there:
        forkserver.check_user(here)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(PermissionError, match="this one to 12345"):
            forkserver.check_user(there)


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


def test_the_server_ends_with_its_command(served):
    running = served("sh", "-c", "echo started; exec sleep 60")
    assert running.stdout.readline() == "started\n"
    (server,) = children(running.pid)
    with ends_soon(server):
        running.terminate()
    assert running.communicate(timeout=60) == ("", "")


def wait_for(path: Path) -> None:
    for _ in range(1000):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} never came")
