"""Jobs without the start-up: a process that has imported the libraries once, and forks.

    python -m keycut.forkserver snakemake --profile profiles/demo

runs the command with a server beside it. Jobs of the workflow that find it hand themselves over:
the script runs in a fork, where torch, transformers, flash-linear-attention, lm-eval and peft are
loaded already, which takes longer than most of the demo's work. Without a server the same scripts
run as they are, and so do jobs of several threads, since a fork has one. Keycut's own modules are
never loaded before the fork, so a change to them counts at once, and no torch operation runs
before it, since its threads would not survive.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

SOCKET = "KEYCUT_FORK_SERVER"
FORKED = "KEYCUT_FORKED"

LIBRARIES = (
    "torch", "transformers", "transformers.modeling_utils", "transformers.models.auto",
    "fla", "fla.models", "peft", "datasets", "lm_eval.api.task", "lm_eval.evaluator",
    "safetensors.torch", "pandas", "pandera", "scipy.linalg", "matplotlib.pyplot",
)  # fmt: skip
GPU = Path("/dev/nvidiactl")


def hand_over() -> None:
    """Let the server run this script, and leave with its exit code; go on if there is none."""
    address = os.environ.get(SOCKET)
    if address is None or FORKED in os.environ:
        return
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
        except OSError as error:
            sys.exit(f"keycut: the fork server at {address} does not answer: {error.strerror}")
        request = {
            "script": str(Path(sys.argv[0]).resolve()),
            "arguments": sys.argv[1:],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }
        message = json.dumps(request).encode()
        socket.send_fds(connection, [len(message).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(message)
        answer = connection.recv(4)
    if not answer:
        sys.exit("keycut: the fork server ended before the job did")
    sys.exit(int.from_bytes(answer, "big"))


def pidfd(process: int) -> int:
    """A file that can be read once the process has ended: os.pidfd_open, which Pythons built for
    old systems do not have, conda's among them. The number of the call is one for all machines."""
    found = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(434), ctypes.c_long(process), ctypes.c_long(0)
    )
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


class Server:
    """Takes jobs one after the other and lets each run in a fork of its own."""

    def __init__(self, listener: socket.socket, command: int) -> None:
        self.listener = listener
        self.events = selectors.DefaultSelector()
        self.events.register(listener, selectors.EVENT_READ, self.accept)
        # When the command has ended, so has the reason to stay.
        self.events.register(command, selectors.EVENT_READ, self.leave)
        self.running: dict[int, socket.socket] = {}

    def serve(self) -> None:
        while True:
            for key, _ in self.events.select():
                key.data(key.fileobj)

    def leave(self, _: Any) -> None:
        for process in self.running:
            os.killpg(process, signal.SIGTERM)
        sys.exit(0)

    def accept(self, _: Any) -> None:
        connection, _ = self.listener.accept()
        header, files, _, _ = socket.recv_fds(connection, 4, 3)
        size, message = int.from_bytes(header, "big"), b""
        while len(message) < size:
            message += connection.recv(size - len(message))
        process = os.fork()
        if process == 0:
            self._become(json.loads(message), files)
        for file in files:
            os.close(file)
        self.running[process] = connection
        ended = pidfd(process)
        self.events.register(ended, selectors.EVENT_READ, lambda fd: self.report(fd, process))
        # A client has nothing more to say: whatever comes from it is its end.
        self.events.register(connection, selectors.EVENT_READ, lambda c: self.stop(c, process))

    def report(self, ended: Any, process: int) -> None:
        """A job has ended: tell its client how."""
        self.events.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        connection = self.running.pop(process)
        if connection in self.events.get_map():
            self.events.unregister(connection)
            connection.sendall((code if code >= 0 else 128 - code).to_bytes(4, "big"))
        connection.close()

    def stop(self, connection: Any, process: int) -> None:
        """A client has been killed: its job is told to save and end."""
        self.events.unregister(connection)
        os.killpg(process, signal.SIGTERM)

    def _become(self, request: dict[str, Any], files: list[int]) -> None:
        """In the fork: be the process that the client would have been."""
        code = 1
        try:
            os.setsid()
            self.events.close()
            self.listener.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update({**request["environment"], FORKED: "1"})
            sys.argv = [request["script"], *request["arguments"]]
            runpy.run_path(request["script"], run_name="__main__")
            code = 0
        except SystemExit as stopped:
            code = _exit_code(stopped)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
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
        sys.exit("usage: python -m keycut.forkserver COMMAND [ARGUMENT ...]")
    folder = Path(tempfile.mkdtemp(prefix="keycut-"))
    with socket.socket(socket.AF_UNIX) as listener:
        # Jobs that come while the server still imports wait here.
        listener.bind(str(folder / "jobs"))
        listener.listen(64)
        command_itself = pidfd(os.getpid())
        if os.fork() == 0:
            try:
                _serve(listener, command_itself)
            finally:
                shutil.rmtree(folder)
    os.execvpe(command[0], command, {**os.environ, SOCKET: str(folder / "jobs")})


def _serve(listener: socket.socket, command: int) -> None:
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
    Server(listener, command).serve()


def before_the_fork() -> list[str]:
    """What is loaded once for all jobs. fla looks at the GPU as it is imported, where there is one,
    and no fork of that process could use it: each job imports fla itself then."""
    return [name for name in LIBRARIES if not (GPU.exists() and name.split(".")[0] == "fla")]


if __name__ == "__main__":
    main(sys.argv[1:])
