"""Jobs without the start-up: a process that has imported the libraries once, and forks.

    python -m reproduction.running.forkserver snakemake --profile profiles/demo

runs the command with a server beside it. Jobs of the workflow that find it hand themselves over:
the script runs in a fork, where torch, transformers, flash-linear-attention, lm-eval and peft are
loaded already, which takes longer than most of the demo's work. Without a server the same scripts
run as they are, and so do jobs of several threads, since a fork has one. Statecut's own modules are
never loaded before the fork, so a change to them counts at once, and no torch operation runs
before it, since its threads would not survive.

    command (snakemake) ── client (the job's script: waits for the exit code)
    server ── supervisor ── job (the same script)
                       ╰╌╌╌ worker, with --stay (the same script, then those of other clients)

The server only accepts and forks. The supervisor, one for each client, reads the request, forks the
job, and tells the client how it ended, so a job outlives the server. A job is told to end (SIGTERM:
training saves and leaves) when its client, its supervisor or the command has ended, and the client
stays until the job has. The socket has a name but no file, so nothing is left behind.

    python -m reproduction.running.forkserver --stay 11 snakemake --profile profiles/lab

keeps up to 11 processes, and evaluations run in them one after another. On a GPU that saves each
what a fork cannot inherit: importing flash-linear-attention, the CUDA context, and loading compiled
kernels. The supervisor relays the job to an idle worker, or to a new one while there are fewer than
11; if all are at work it forks the job as ever. A job that fails leaves its worker usable. When its
client or the command has ended, a job is killed with its worker, so that nothing goes on half done;
if its supervisor was killed it runs to its end, and the client waits for that. A worker that died,
or began before a file of Statecut was changed, is replaced. All of them end with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
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
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

SERVER = "REPRODUCTION_FORK_SERVER"  # the variable with the name of the socket
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

# Rules whose jobs may share a process: an evaluation changes nothing in it that counts for the next
# one, and saves nothing when it is told to end. Training does save then, which a worker, being
# killed, cannot; refit wraps functions of libraries and sets how torch multiplies while it works.
STAY = ("evaluate",)
MOST = 100  # workers: the queue of idle ones has room for some 200
SOURCE = Path(__file__).parents[2]


def hand_over(*, stays: bool = False) -> None:
    """Let the server run this script, and leave with its exit code; go on if there is none.
    `stays`: also in a process that has run others before, and will run more."""
    name = os.environ.get(SERVER)
    if name is None:
        return
    request = {
        "script": str(Path(sys.argv[0]).resolve()),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": {key: value for key, value in os.environ.items() if key != SERVER},
        "stays": stays,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"\0{name}")
            check_user(connection)
            send(request, connection)
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
        sys.exit(
            "reproduction: the supervisor of this job was killed, and the job has ended with it"
        )
    sys.exit(code[0])


def send(request: dict[str, Any], connection: socket.socket, *files: int) -> None:
    """A request with the standard streams of this process, and other open files."""
    socket.send_fds(connection, [b"+"], [0, 1, 2, *files])
    connection.sendall(json.dumps(request).encode() + b"\n")


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and its other files. Its streams become those of this process."""
    _, files, _, _ = socket.recv_fds(connection, 1, 4)
    request = json.loads(connection.makefile("rb").readline())
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    return request, files[3:]


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
        code = outcome(work, *arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def outcome(work: Callable[..., None], *arguments: Any) -> int:
    """The exit code of a process that does the work; what it raises is printed."""
    try:
        work(*arguments)
    except SystemExit as stopped:
        return _exit_code(stopped)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _exit_code(stopped: SystemExit) -> int:
    if stopped.code is None:
        return 0
    if isinstance(stopped.code, int):
        return stopped.code
    print(stopped.code, file=sys.stderr)
    return 1


def main(arguments: list[str]) -> None:
    """Become the command, with a server as its child."""
    parser = argparse.ArgumentParser(
        usage="python -m reproduction.running.forkserver [--stay N] COMMAND [ARGUMENT ...]",
        description="Run a command beside a server that has the libraries of its jobs loaded.",
    )
    parser.add_argument(
        "--stay", type=int, default=0, metavar="N",
        help="keep up to N processes for evaluations, which run in them one after another",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("no command")
    if not 0 <= options.stay <= MOST:
        parser.error(f"--stay {options.stay}: must lie between 0 and {MOST}")
    name = f"reproduction-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        # Jobs that come while the server still imports wait here.
        listener.bind(f"\0{name}")
        listener.listen(64)
        fork(serve, listener, pidfd(os.getpid()), options.stay)
    if options.stay:
        check_one_gpu()
    os.execvpe(options.command[0], options.command, {**os.environ, SERVER: name})


def check_one_gpu() -> None:
    """An error where there are several: each job takes one that is free, and a process of CUDA
    keeps to its first."""
    from reproduction.running.gpus import visible_gpus  # not before the fork

    if len(gpus := visible_gpus()) > 1:
        sys.exit(
            f"reproduction: --stay is for one GPU, and {len(gpus)} are visible, of which a process "
            f"that stays cannot change: set CUDA_VISIBLE_DEVICES={gpus[0]}, or leave --stay out"
        )


def serve(listener: socket.socket, command: int, stay: int) -> None:
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
    idle = IdleWorkers(stay)
    while command not in select.select([listener.fileno(), command], [], [])[0]:
        with listener.accept()[0] as connection:
            fork(supervise, connection, listener, command, idle)


def before_the_fork() -> list[str]:
    """What is loaded once for all jobs. fla looks at the GPU as it is imported, where there is one,
    and no fork of that process could use it: each job imports fla itself then."""
    return [name for name in LIBRARIES if not (GPU.exists() and name.split(".")[0] == "fla")]


class Worker(NamedTuple):
    process: int
    code: int  # `code_state` when it began
    connection: socket.socket


class IdleWorkers:
    """What supervisors share: a queue of idle workers, and places for new ones."""

    def __init__(self, places: int) -> None:
        # A worker waits here as its connection, on the way from one supervisor to the next.
        self.end, self.start = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.start.setblocking(False)
        # A byte for each place; where none is left, nothing is read.
        self.places, places_end = os.pipe()
        os.write(places_end, bytes(places))
        os.close(places_end)

    def put(self, worker: Worker) -> None:
        message = json.dumps([worker.process, worker.code]).encode()
        socket.send_fds(self.end, [message], [worker.connection.fileno()])

    def take(self, connection: socket.socket, command: int) -> Worker | None:
        """An idle worker that has the code of now, or a new one; None if all are at work."""
        files: list[int] = []
        with contextlib.suppress(BlockingIOError):
            message, files, _, _ = socket.recv_fds(self.start, 100, 1)
        if not files and not os.read(self.places, 1):
            return None
        code = code_state()
        if files:
            process, began_with = json.loads(message)
            worker = Worker(process, began_with, socket.socket(fileno=files[0]))
            # It says nothing unasked: where there is something to read, it has ended.
            if worker.code == code and not select.select([worker.connection], [], [], 0)[0]:
                return worker
            worker.connection.close()  # and so it ends
        here, there = socket.socketpair()
        process = fork(stay, there, command, [here, connection, self.end, self.start])
        there.close()
        os.setpgid(process, process)  # what it starts is killed with it
        return Worker(process, code, here)


def code_state() -> int:
    """Another number after any change to our files. A job checks the files, and would run what a
    worker has imported of them before. No copy keeps the time that is looked at (st_ctime)."""

    def changed(file: Path) -> int:
        try:
            return file.stat().st_ctime_ns
        except FileNotFoundError:  # gone again, or an editor's lock, which is a link to nowhere
            return 0

    files = (file for file in SOURCE.rglob("*.*") if "__pycache__" not in file.parts)
    return hash(frozenset((file, changed(file)) for file in files))


def supervise(
    connection: socket.socket, listener: socket.socket, command: int, idle: IdleWorkers
) -> None:
    """The supervisor: run the job of one client, and tell it the exit code."""
    listener.close()  # once the server has ended, nobody shall wait there
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    connection.settimeout(TIMEOUT)
    try:
        check_user(connection)
        request, _ = receive(connection)
        connection.sendall(b"+")
    except (OSError, ValueError):
        return  # the client has gone, or is none of ours
    connection.settimeout(None)
    if request["stays"] and (worker := idle.take(connection, command)):
        code = relay(request, worker, connection, command)
        idle.put(worker)
    else:
        code = run_in_fork(request, connection, command)
    with contextlib.suppress(OSError):  # the client may have gone
        connection.sendall(bytes([code if code >= 0 else 128 - code]))


def run_in_fork(request: dict[str, Any], connection: socket.socket, command: int) -> int:
    job = fork(run, request, os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ended = pidfd(job)
    # The client has nothing more to say: whatever comes from it is its end.
    if ended not in select.select([ended, connection.fileno(), command], [], [])[0]:
        os.killpg(0, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])


def relay(request: dict[str, Any], worker: Worker, connection: socket.socket, command: int) -> int:
    """The exit code of a job that a worker runs, or is killed with."""
    code, killed = b"", False
    with contextlib.suppress(OSError):  # the worker may have died
        send(request, worker.connection, connection.fileno())
        ended = worker.connection.fileno()
        if ended not in select.select([ended, connection.fileno(), command], [], [])[0]:
            killed = True
            os.killpg(worker.process, signal.SIGKILL)
        code = worker.connection.recv(1)  # nothing once it has ended
    if not code and not killed:
        print(
            "reproduction: the process that ran this job, and stays for others, was killed or has "
            "crashed; the next job has a new one",
            file=sys.stderr,
        )
    return code[0] if code else -signal.SIGKILL


def stay(supervisor: socket.socket, command: int, others: list[socket.socket]) -> None:
    """A worker: one job after another, until the command or all who know of it have ended.

    It has the connection of a job's client for as long as the job runs: so long the client waits,
    also if the supervisor is killed.
    """
    for other in others:
        other.close()
    path, null = [*sys.path], os.open(os.devnull, os.O_RDWR)
    while True:
        for number in range(3):
            os.dup2(null, number)
        if command in select.select([supervisor.fileno(), command], [], [])[0]:
            return
        try:
            request, (client,) = receive(supervisor)
        except (OSError, ValueError):
            return
        code = outcome(execute, request)
        sys.stdout.flush()
        sys.stderr.flush()
        sys.path[:] = path  # Snakemake's scripts add to it
        free_memory()
        os.close(client)
        with contextlib.suppress(OSError):
            supervisor.sendall(bytes([code % 256]))


def free_memory() -> None:
    """Of the job before, and undo its limit (`gpus.limit_memory`)."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # raises after an error that CUDA does not recover from
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def run(request: dict[str, Any], supervisor: int) -> None:
    """The job: be the process that the client would have been.

    It inherits the connection and never closes it: as long as it lives, so does its client.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != supervisor:
        sys.exit("reproduction: the supervisor of this job was killed before it began")
    execute(request)


def execute(request: dict[str, Any]) -> None:
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
