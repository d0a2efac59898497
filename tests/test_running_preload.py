"""Jobs in forks of a process that has the libraries loaded."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from reproduction.running.preload import check_user

# A server that has loaded nothing, and a command beside it.
SERVER = """
import sys
from reproduction.running import preload
preload.LIBRARIES = ("colorsys",)
preload.main(sys.argv[1:])
"""
# A script as Snakemake starts it.
SCRIPT = """
import os, sys
from reproduction.running import preload
preload.hand_over()
{work}
"""


@pytest.fixture
def run(tmp_path):
    def start(work, *command, **options):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(work=work))
        command = command or (sys.executable, str(script))
        return subprocess.Popen(
            [sys.executable, "-c", SERVER, *command], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )  # fmt: skip

    return start


def test_a_script_runs_in_a_fork_with_its_folder_streams_variables_and_exit_code(run, tmp_path):
    work = "print(os.getcwd(), os.getenv('WORD'), __name__, 'colorsys' in sys.modules)\nsys.exit(7)"
    done = run(work, env={**os.environ, "WORD": "some"})
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (7, f"{tmp_path} some __main__ True\n"), err


@pytest.mark.parametrize(
    ("work", "code", "message"),
    [
        ("sys.exit('bad input')", 1, "bad input"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed"),
        ("print('fine')", 0, ""),
    ],
)
def test_how_it_ends_is_how_its_client_ends(run, work, code, message):
    done = run(work)
    _, err = done.communicate(timeout=60)
    assert done.returncode == code
    assert message in err


TRAINS = """
import signal, time
def save(*_):
    open("saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open("begun", "w").close()
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_saves_when_its_client_is_told_to_end_or_killed(run, tmp_path, number):
    done = run(TRAINS)  # which became the client
    wait_until((tmp_path / "begun").exists)
    done.send_signal(number)
    done.communicate(timeout=60)
    wait_until((tmp_path / "saved").exists)
    assert done.returncode == (75 if number == signal.SIGTERM else -number)


def wait_until(true):
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_without_a_server_the_script_runs_as_it_is(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(work="print('ran')"))
    for variables in ({}, {"REPRODUCTION_PRELOAD": str(tmp_path / "gone")}):
        command = [sys.executable, str(script)]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "ran\n")


def test_the_server_ends_with_its_command_and_has_no_file(run, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    # Its error stream is the command's: the end of it is the end of both.
    run("", "true", env=environment).communicate(timeout=60)
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]


def test_what_a_script_imports_to_hand_itself_over_is_light():
    code = "import sys\nimport reproduction.running.job\n"
    code += "print({'pydantic', 'yaml', 'torch', 'reproduction.config'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_the_socket_of_another_user_is_refused(monkeypatch):
    for connection in socket.socketpair():
        with connection:
            check_user(connection)
            monkeypatch.setattr(os, "getuid", lambda: 4321)
            with pytest.raises(PermissionError):
                check_user(connection)
            monkeypatch.undo()
