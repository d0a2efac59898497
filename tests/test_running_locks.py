"""One job at a time on an output."""

import errno
import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from reproduction.running.locks import exclusive_lock

FORK = multiprocessing.get_context("fork")


def writes(output, pipe):
    with exclusive_lock([output]):
        pipe.send("began")
        pipe.poll(None)
        Path(output).write_text("first")


@pytest.fixture
def other(tmp_path):
    """Another process that is at work on the same output, until it is told to go on."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=writes, args=(tmp_path / "out", there))
    process.start()
    here.recv()
    process.pipe = here
    yield process
    if not here.closed:
        here.send("go on")
    process.join()


def test_the_second_waits(other, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    # The first is let go on when the second begins to wait.
    real, waited = fcntl.flock, []

    def flock(file, how):
        if not how & fcntl.LOCK_NB:
            other.pipe.send("go on")
            waited.append(file)
        return real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive_lock([tmp_path / "out"]) as told:
        assert told
        assert waited
        assert (tmp_path / "out").read_text() == "first"
    assert f"waiting for process {other.pid} on " in caplog.text


def test_a_killed_process_holds_nothing(other, tmp_path):
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    other.pipe.close()
    with exclusive_lock([tmp_path / "out"]) as waited:
        assert not waited
    assert [*tmp_path.iterdir()] == []


def test_many_at_once_are_never_two(tmp_path):
    inside = tmp_path / "inside"

    def work():
        for _ in range(20):
            with exclusive_lock([tmp_path / "folder" / "out"]):
                inside.touch(exist_ok=False)
                inside.unlink()

    processes = [FORK.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, caplog):
    def refused(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with exclusive_lock([tmp_path / "out"]):
        pass
    assert "has no locks: No locks available" in caplog.text


def test_a_lock_file_that_another_machine_removed_is_made_again(tmp_path, monkeypatch):
    real, calls = os.fstat, []

    def stale_once(file):
        calls.append(file)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(file)

    monkeypatch.setattr(os, "fstat", stale_once)
    with exclusive_lock([tmp_path / "out"]):
        assert (tmp_path / ".out.lock").is_file()
    assert len(calls) > 1


def test_a_rule_without_outputs_needs_no_lock():
    with exclusive_lock([]):
        pass
