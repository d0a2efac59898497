"""Jobs without the start-up: a process that has imported the libraries once, and forks.

    python -m keycut.running.forkserver snakemake --profile profiles/demo

runs the command with a server beside it. Jobs of the workflow that find it hand themselves over:
the script runs in a fork, where torch, transformers, flash-linear-attention, lm-eval and peft are
loaded already, which takes longer than most of the demo's work. Without a server the same scripts
run as they are, and so do jobs of several threads, since a fork has one. Keycut's own modules are
never loaded before the fork, so a change to them counts at once, and no torch operation runs
before it, since its threads would not survive.

    command (snakemake) ── client (the job's script: waits for the exit code)
    server ── supervisor ── job (the same script)

The server only accepts and forks. The supervisor, one for each client, reads the request, forks the
job, and tells the client how it ended, so a job outlives the server. A job is told to end (SIGTERM:
training saves and leaves) when its client, its supervisor or the command has ended, and the client
stays until the job has. The socket has a name but no file, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SERVER = "KEYCUT_FORK_SERVER"  # the variable with the name of the socket
TIMEOUT = 10  # seconds in which a client has to send its request
PR_SET_PDEATHSIG = 1

LIBRARIES = (
    "torch", "transformers", "transformers.modeling_utils", "transformers.models.auto",
    "fla", "fla.models", "peft", "datasets", "lm_eval.api.task", "lm_eval.evaluator",
    "safetensors.torch", "pandas", "pandera", "scipy.linalg", "matplotlib.pyplot",
    # Most of the time that fla takes to import: where there is a GPU, each job imports fla itself.
    "torch._inductor.compile_fx", "torch.distributed._tensor",
)  # fmt: skip
GPU = Path("/dev/nvidiactl")


def hand_over() -> None:
    """Let the server run this script, and leave with its exit code; go on if there is none."""
    name = os.environ.get(SERVER)
    if name is None:
        return
    request = {
        "script": str(Path(sys.argv[0]).resolve()),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": {key: value for key, value in os.environ.items() if key != SERVER},
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"\0{name}")
            check_user(connection)
            socket.send_fds(connection, [b"+"], [0, 1, 2])
            connection.sendall(json.dumps(request).encode() + b"\n")
            if not connection.recv(1):
                raise ConnectionError("it has ended")
        except OSError as error:
            logger.warning(f"no fork server ({error}): this job loads the libraries itself")
            return
        # The supervisor takes the end of our side for our end. We stay until the job has ended:
        # Snakemake deletes the outputs of a job that has failed.
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as shells set it in the background
                signal.signal(number, lambda *_: connection.shutdown(socket.SHUT_WR))
        code = connection.recv(1)
    if not code:
        sys.exit("keycut: the supervisor of this job was killed, and the job has ended with it")
    sys.exit(code[0])


def check_user(connection: socket.socket) -> None:
    """A socket without a file can be reached by all users of the machine."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    if user != os.getuid():
        raise PermissionError(f"the other side belongs to user {user}, this one to {os.getuid()}")


def pidfd(process: int) -> int:
    """A file that can be read once the process has ended: os.pidfd_open, which Pythons built for
    old systems do not have, conda's among them. The number of the call is one for all machines."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(434), ctypes.c_long(process), ctypes.c_long(0)
    )
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(descriptor)


def fork(work: Callable[..., None], *arguments: Any) -> int:
    """A child that does the work and ends, whatever happens: it never returns from here."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        try:
            work(*arguments)
            code = 0
        except SystemExit as stopped:
            code = _exit_code(stopped)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code(stopped: SystemExit) -> int:
    if stopped.code is None:
        return 0
    if isinstance(stopped.code, int):
        return stopped.code
    print(stopped.code, file=sys.stderr)
    return 1


def main(command: list[str]) -> None:
    """Become the command, with a server as its child."""
    if not command:
        sys.exit("usage: python -m keycut.running.forkserver COMMAND [ARGUMENT ...]")
    name = f"keycut-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        # Jobs that come while the server still imports wait here.
        listener.bind(f"\0{name}")
        listener.listen(64)
        fork(serve, listener, pidfd(os.getpid()))
    os.execvpe(command[0], command, {**os.environ, SERVER: name})


def serve(listener: socket.socket, command: int) -> None:
    """The server: a supervisor for every client, until the command has ended."""
    # Ctrl-C is for the command alone: it ends its jobs, and the server ends with it.
    os.setsid()
    # flash-linear-attention warns that there is no GPU, which a CPU's user knows.
    warnings.filterwarnings("ignore", message="Triton is not supported")
    # Python warns of threads at a fork. Those there are belong to OpenBLAS and jemalloc, which see
    # to it themselves.
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded")
    # Kernels under torch settle on a number of threads as they are loaded, and two jobs with a
    # thread per core each are slower than one after the other.
    os.environ["OMP_NUM_THREADS"] = "1"
    # To count GPUs, torch may ask the driver: a process that did cannot hand them on to its forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for library in before_the_fork():
        importlib.import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    while command not in select.select([listener.fileno(), command], [], [])[0]:
        with listener.accept()[0] as connection:
            fork(supervise, connection, listener, command)


def before_the_fork() -> list[str]:
    """What is loaded once for all jobs. fla looks at the GPU as it is imported, where there is one,
    and no fork of that process could use it: each job imports fla itself then."""
    return [name for name in LIBRARIES if not (GPU.exists() and name.split(".")[0] == "fla")]


def supervise(connection: socket.socket, listener: socket.socket, command: int) -> None:
    """The supervisor: run the job of one client, and tell it the exit code."""
    listener.close()  # once the server has ended, nobody shall wait there
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    connection.settimeout(TIMEOUT)
    try:
        check_user(connection)
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(connection.makefile("rb").readline())
        connection.sendall(b"+")
    except (OSError, ValueError):
        return  # the client has gone, or is none of ours
    connection.settimeout(None)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    job = fork(run, request, os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ended = pidfd(job)
    # The client has nothing more to say: whatever comes from it is its end.
    if ended not in select.select([ended, connection.fileno(), command], [], [])[0]:
        os.killpg(0, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    with contextlib.suppress(OSError):  # the client may have gone
        connection.sendall(bytes([code if code >= 0 else 128 - code]))


def run(request: dict[str, Any], supervisor: int) -> None:
    """The job: be the process that the client would have been.

    It inherits the connection and never closes it: as long as it lives, so does its client.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != supervisor:
        sys.exit("keycut: the supervisor of this job was killed before it began")
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
