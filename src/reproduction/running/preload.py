"""Small jobs without the imports: a process that has loaded the libraries once, and forks.

    python -m reproduction.running.preload snakemake --profile profiles/demo

runs the command with such a process beside it. A job that finds it hands itself over: its script
runs in a fork, where torch, transformers, fla, lm-eval and peft are loaded. Without it the same
scripts run as they are. Statecut's own modules are never loaded before the fork. A job gets SIGTERM
(training saves) when its client ends; jobs outlive the process that forked them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings

SOCKET, FORKED = "REPRODUCTION_PRELOAD", "forked"  # the variable with its name; its value in a fork
LIBRARIES = (
    "torch", "transformers", "transformers.modeling_utils", "transformers.models.auto",
    "fla", "fla.models", "peft", "datasets", "lm_eval.api.task", "lm_eval.evaluator",
    "safetensors.torch", "pandas", "scipy.linalg", "matplotlib.pyplot",
    "torch._inductor.compile_fx", "torch.distributed._tensor", "pydantic", "snakemake.script",
)  # fmt: skip


def hand_over() -> None:
    """Let this script run in a fork, and leave with its exit code; go on without a server."""
    if os.environ.get(SOCKET, FORKED) == FORKED:
        return
    environment = {**os.environ, SOCKET: FORKED}
    request = json.dumps([os.path.abspath(sys.argv[0]), os.getcwd(), environment])
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"\0{os.environ[SOCKET]}")
            check_user(connection)
            socket.send_fds(connection, [b"+"], [0, 1, 2])
            connection.sendall(request.encode() + b"\n")
            if not connection.recv(1):
                raise ConnectionError
        except OSError:  # it was killed
            return
        # We stay until the job has ended: Snakemake deletes the outputs of one that has failed.
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as shells set it in the background
                signal.signal(number, lambda *_: connection.shutdown(socket.SHUT_WR))
        code = connection.recv(1)
    sys.exit(code[0] if code else "reproduction: the process that ran this job was killed")


def main(command: list[str]) -> None:
    """Become the command, with a server as its child."""
    if not command:
        sys.exit("usage: python -m reproduction.running.preload COMMAND [ARGUMENT ...]")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux finds a name, which is no file: a killed server leaves nothing behind
    listener.listen(64)  # jobs that come while the server still imports wait here
    process = os.getpid()
    if os.fork():
        name = listener.getsockname()[1:].decode()
        os.execvpe(command[0], command, {**os.environ, SOCKET: name})
    serve(listener, process)


def check_user(connection: socket.socket) -> None:
    """Any user of this machine can see such a name, and connect to it or take it over."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", peer)[1] != os.getuid():
        raise PermissionError("the other end of this socket belongs to another user")


def serve(listener: socket.socket, command: int) -> None:
    """Fork for every client, until the command has ended."""
    os.setsid()  # Ctrl-C is for the command alone, which ends its jobs
    warnings.filterwarnings("ignore", message="Triton is not supported")
    # Threads at a fork: those of OpenBLAS and jemalloc, which see to it themselves.
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded")
    os.environ["OMP_NUM_THREADS"] = "1"  # which kernels read as they are loaded
    # To count GPUs, torch may ask the driver: a process that did cannot hand them on to its forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for library in LIBRARIES:
        # fla looks at the GPU as it is imported, and no fork of that process could use it.
        if not library.startswith("fla") or not os.path.exists("/dev/nvidiactl"):
            importlib.import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    listener.settimeout(1)
    while os.getppid() == command:
        with contextlib.suppress(TimeoutError, PermissionError):
            connection = listener.accept()[0]
            check_user(connection)
            if os.fork() == 0:
                listener.close()
                run(connection)
            connection.close()


def run(connection: socket.socket) -> None:
    """Be the process that the client would have been, and tell it the exit code."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        script, folder, environment = json.loads(connection.makefile("rb").readline())
        connection.sendall(b"+")
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        threading.Thread(target=end_with, args=(connection,), daemon=True).start()
        code = outcome(script, folder, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code % 256]))
    finally:
        os._exit(0)


def end_with(connection: socket.socket) -> None:
    """The client has nothing more to say: whatever comes from it is its end."""
    connection.recv(1)
    os.killpg(0, signal.SIGTERM)


def outcome(script: str, folder: str, environment: dict[str, str]) -> int:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stopped:
        if not isinstance(stopped.code, str):
            return stopped.code or 0
        print(stopped.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    else:
        return 0
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
