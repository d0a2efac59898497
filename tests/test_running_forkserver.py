"""Jobs that are handed over run as they would have by themselves."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from reproduction.running import forkserver

JOB = """
import os, sys, time
from reproduction.running import forkserver
forkserver.hand_over({how})
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

    def start(
        *command: str, libraries: tuple[str, ...] = ("colorsys",), **variables: str
    ) -> subprocess.Popen[str]:
        small = tmp_path / "small.py"
        small.write_text(
            "import sys\nfrom reproduction.running import forkserver\n"
            f"forkserver.LIBRARIES = {libraries}\nforkserver.main(sys.argv[1:])\n"
        )
        return subprocess.Popen(
            [sys.executable, str(small), *command], cwd=tmp_path,
            env={**environment, "TMPDIR": str(temporary), **variables},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    yield start
    assert not list(temporary.iterdir())


@pytest.fixture
def name(served):
    """The name of a server whose command goes on until the test ends, and the server with it."""
    running = served("sh", "-c", "echo $REPRODUCTION_FORK_SERVER; exec sleep 60")
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
        job(folder, body), env={**os.environ, "REPRODUCTION_FORK_SERVER": name}, cwd=folder,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def job(folder: Path, body: str, how: str = "") -> list[str]:
    script = folder / "job.py"
    script.write_text(JOB.format(body=body, how=how))
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
        "from statecut.process import run_work\n"
        "loaded = \"'colorsys' in __import__('sys').modules\"\n"
        f"{LOADED}\nprint(run_work(map, eval, [loaded], limit_s=60, own_process=True).values)"
    )
    out, err = served(*job(tmp_path, body)).communicate(timeout=60)
    assert out.split() == ["True", "[False]"], err


def test_what_is_timed_apart_ends_with_its_job(served, tmp_path):
    body = (
        "from statecut.process import run_work\n"
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
    running = served("sh", "-c", "echo $REPRODUCTION_FORK_SERVER; exec sleep 60")
    name = running.stdout.readline().strip()
    (server,) = children(running.pid)
    os.kill(server, signal.SIGKILL)
    done = handed_over(tmp_path, name)
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert "no fork server" in done.stderr
    running.kill()
    running.communicate()


REQUEST = {
    "script": "/no/such/file", "arguments": [], "folder": "/", "environment": {}, "stays": False,
}  # fmt: skip


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


class Staying:
    """A server with two workers, and jobs that may stay."""

    def __init__(self, served, folder: Path, **variables: str) -> None:
        sleeps = ("sh", "-c", "echo $REPRODUCTION_FORK_SERVER; exec sleep 60")
        self.command = served("--stay", "2", *sleeps, **variables)
        self.folder = folder
        self.environment = {**os.environ, **variables}
        self.environment["REPRODUCTION_FORK_SERVER"] = self.command.stdout.readline().strip()
        (self.server,) = children(self.command.pid)

    def start(self, body: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*job(self.folder, body, "stays=True"), *arguments], cwd=self.folder, text=True,
            env={**self.environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, body: str) -> tuple[int, str, str]:
        client = self.start(body)
        out, err = client.communicate(timeout=60)
        return client.returncode, out, err

    def worker(self) -> int:
        """The process that the next job runs in."""
        code, out, err = self.run("print(os.getpid())")
        assert (code, err) == (0, "")
        return int(out)

    def busy(self) -> tuple[subprocess.Popen[str], int]:
        """A client whose job goes on until there is a file `go`, and the worker that runs it."""
        client = self.start(
            "print(os.getpid(), flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
            "open('done', 'w').close()"
        )
        return client, int(client.stdout.readline())


@pytest.fixture
def staying(served, tmp_path):
    server = Staying(served, tmp_path)
    yield server
    server.command.kill()
    assert server.command.communicate(timeout=60) == ("", "")


def test_a_worker_runs_one_job_after_another_each_as_if_it_were_alone(staying, tmp_path):
    body = (
        "print(os.getpid(), len(sys.path), 'LEFT' in os.environ)\n"
        "print(os.getcwd(), sys.argv[1:], os.environ['OF'], file=sys.stderr)\n"
        "os.environ['LEFT'] = ''\nsys.path.append('/left')\nos.chdir('/')"
    )
    seen = set()
    for name in ("one", "other"):
        staying.folder = tmp_path / name
        staying.folder.mkdir()
        out, err = staying.start(body, name, OF=name).communicate(timeout=60)
        assert err == f"{tmp_path / name} ['{name}'] {name}\n"
        seen.add(out)
    assert len(seen) == 1
    assert seen.pop().endswith("False\n")


def test_without_workers_and_for_other_jobs_there_is_a_process_each(served, staying, tmp_path):
    one = staying.environment["REPRODUCTION_FORK_SERVER"]
    forks = {handed_over(tmp_path, one, "print(os.getpid())").stdout for _ in range(2)}
    assert len(forks | {f"{staying.worker()}\n"}) == 3
    command = " ".join(job(tmp_path, "print(os.getpid())", "stays=True"))
    out, err = served("sh", "-c", f"{command}; {command}").communicate(timeout=60)
    assert (len({*out.split()}), err) == (2, "")


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [("sys.exit(75)", 75, ""), ("sys.exit('no')", 1, "no\n"), ("sys.exit(-1)", 255, ""),
     ("1 / 0", 1, "ZeroDivisionError: division by zero\n"), ("raise KeyboardInterrupt", 1, "\n")],
)  # fmt: skip
def test_a_job_that_fails_leaves_its_worker_usable(staying, body, code, message):
    worker = staying.worker()
    failed, out, err = staying.run(body)
    assert (failed, out) == (code, "")
    assert err.endswith(message)
    assert staying.worker() == worker


def test_a_worker_that_dies_fails_its_job_and_is_replaced(staying):
    worker = staying.worker()
    code, _, err = staying.run("os.kill(os.getpid(), 11)")
    assert code == 137
    assert "the process that ran this job" in err
    assert staying.worker() != worker


def test_a_worker_that_dies_while_it_is_idle_fails_no_job(staying):
    worker = staying.worker()
    with ends_soon(worker):
        os.kill(worker, signal.SIGKILL)
    assert staying.worker() != worker


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_job_of_a_client_that_ends_is_killed_with_its_worker(staying, tmp_path, number):
    client, worker = staying.busy()
    with ends_soon(worker):
        client.send_signal(number)
        assert client.wait(60) == (-9 if number == signal.SIGKILL else 137)
    assert client.communicate() == ("", "")
    (tmp_path / "go").touch()
    assert staying.worker() != worker
    assert not (tmp_path / "done").exists()


def test_what_a_killed_job_has_started_is_killed_too(staying):
    client = staying.start(
        "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    with ends_soon(int(client.stdout.readline())):
        client.kill()
    client.communicate()


def test_workers_end_when_the_command_is_killed(staying):
    worker = staying.worker()
    with ends_soon(worker, staying.server):
        staying.command.kill()


def test_workers_at_work_end_when_the_command_is_killed(staying):
    client, worker = staying.busy()
    with ends_soon(worker, staying.server):
        staying.command.kill()
    assert client.wait(60) == 137
    assert client.communicate() == ("", "")


def test_workers_end_when_the_server_is_killed_and_they_are_idle(staying, tmp_path):
    client, worker = staying.busy()
    os.kill(staying.server, signal.SIGKILL)
    with ends_soon(worker):
        (tmp_path / "go").touch()
        assert client.wait(60) == 0
    assert client.communicate() == ("", "")


def test_a_client_waits_for_its_job_in_a_worker_also_if_the_supervisor_is_killed(staying, tmp_path):
    client, worker = staying.busy()
    (supervisor,) = children(staying.server)
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(0.2)
    assert client.poll() is None
    with ends_soon(worker):
        (tmp_path / "go").touch()
        assert client.wait(60) == 1
    assert (tmp_path / "done").exists()
    assert "the supervisor of this job was killed" in client.communicate()[1]
    assert staying.worker() != worker


def test_a_job_that_finds_all_workers_at_work_runs_in_a_fork(staying, tmp_path):
    clients, workers = zip(staying.busy(), staying.busy(), strict=True)
    others = {staying.worker(), staying.worker()}
    (tmp_path / "go").touch()
    for client in clients:
        client.communicate(timeout=60)
    assert len({*workers} | others) == 4
    assert {staying.worker(), staying.worker()} == {*workers}


MODULES = ("__init__", "forkserver", "gpus")


def test_a_worker_that_has_imported_older_code_is_never_used(served, tmp_path):
    package = tmp_path / "src" / "reproduction"
    needed = [f"reproduction/running/{name}.py" for name in MODULES]
    for name in ("statecut/errors.py", "reproduction/__init__.py", *needed):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(forkserver.SOURCE / name, tmp_path / "src" / name)
    (tmp_path / "src" / "statecut" / "__init__.py").touch()
    (package / "rule.py").write_text("VALUE = 'old'")
    staying = Staying(served, tmp_path, PYTHONPATH=str(package.parent))
    body = "import reproduction.rule\nprint(os.getpid(), reproduction.rule.VALUE)"
    first, again = staying.run(body), staying.run(body)
    assert first == again
    assert first[1].split()[1:] == ["old"]
    newer = tmp_path / "newer.py"
    newer.write_text("VALUE = 'new'")
    os.utime(newer, (0, 0))  # as an archive or a copy would set it
    with ends_soon(int(first[1].split()[0])):
        newer.replace(package / "rule.py")
        changed = staying.run(body)
    assert changed[1].split()[1:] == ["new"]
    assert staying.run(body) == changed
    staying.command.kill()
    staying.command.communicate()


def test_the_gpu_memory_of_a_job_is_free_for_others_when_it_has_ended(monkeypatch):
    calls = []
    used = SimpleNamespace(
        is_initialized=lambda: True,
        synchronize=lambda: calls.append("synchronize"),
        empty_cache=lambda: calls.append("empty_cache"),
        set_per_process_memory_fraction=calls.append,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=used))
    forkserver.free_memory()
    assert calls == ["synchronize", "empty_cache", 1.0]
    used.is_initialized = lambda: False
    forkserver.free_memory()
    assert len(calls) == 3


def test_workers_are_refused_where_there_are_several_gpus(served):
    running = served("--stay", "2", "true", CUDA_VISIBLE_DEVICES="3,4")
    assert "2 are visible" in running.communicate(timeout=60)[1]
    assert running.returncode == 1
    assert served("--stay", "2", "true", CUDA_VISIBLE_DEVICES="3").wait(60) == 0


@pytest.mark.parametrize("arguments", ["", "--stay 2", "--stay x true", "--stay 1000 true"])
def test_a_call_that_is_none_says_how_it_goes(arguments, capsys):
    with pytest.raises(SystemExit):
        forkserver.main(arguments.split())
    assert (
        "usage: python -m reproduction.running.forkserver [--stay N] COMMAND"
        in capsys.readouterr().err
    )


def wait_for(path: Path) -> None:
    for _ in range(1000):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} never came")


def test_a_file_that_comes_and_goes_is_a_change_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(forkserver, "SOURCE", tmp_path)
    (tmp_path / "module.py").touch()
    before = forkserver.code_state()
    lock = tmp_path / ".#module.py"
    lock.symlink_to("nobody@nowhere")  # as editors mark what they have open
    assert forkserver.code_state() != before
    lock.unlink()
    assert forkserver.code_state() == before
