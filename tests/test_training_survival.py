"""Killed, told to stop, or out of disk: a run goes on, and ends as if nothing had happened."""

import errno
import fcntl
import itertools
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training_runs
from safetensors.torch import load_file

from statecut.errors import InputError
from statecut.files import sha256
from statecut.recovery.checkpoints import CURVE, Checkpoints
from statecut.recovery.loop import EXIT_UNFINISHED, stop_on_signals

OFTEN = 0.02  # seconds: every few steps
DONE = (CURVE, "model.safetensors")
LIMIT = 300  # seconds, for whatever hangs

# Real processes, forked from one that has done the slow imports and nothing else.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["statecut.recovery.training", "statecut.models.shared_conv"])


@contextmanager
def started(work, *arguments):
    process = PROCESSES.Process(target=_alone, args=(work, *arguments))
    process.start()
    yield process
    process.join(LIMIT)
    assert process.exitcode is not None


def finished(work, *arguments):
    with started(work, *arguments) as process:
        pass
    assert process.exitcode == 0


def _alone(work, *arguments):
    torch.set_num_threads(1)
    getattr(training_runs, work)(*arguments)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("training")
    finished("making", root)
    return root


def steps_done(root, out):
    """The rows of the loss curve that is being written, without its heading."""
    rows = [path.read_text().count("\n") for path in (root / "running" / out).glob(f"*/{CURVE}")]
    return max(rows, default=1) - 1


def wait_for(root, out, steps, process):
    limit = time.monotonic() + LIMIT
    while steps_done(root, out) < steps and process.is_alive():
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.fixture(scope="module", params=["pretraining", "recovering"])
def unbroken(request, root):
    """A run that nothing happened to."""
    work = request.param
    finished(work, root, f"{work}_unbroken", OFTEN)
    return work, {name: sha256(root / f"{work}_unbroken" / name) for name in DONE}


def test_a_run_that_is_killed_ends_with_the_same_bits(root, unbroken):
    work, expected = unbroken
    out = f"{work}_killed"
    chance = random.Random()  # another moment each time: none may matter
    for steps in sorted(chance.sample(range(1, 16), 3)):
        with started(work, root, out, OFTEN) as process:
            wait_for(root, out, steps, process)
            time.sleep(chance.uniform(0, 0.03))
            process.kill()
        assert process.exitcode == -signal.SIGKILL
    finished(work, root, out, OFTEN)
    assert {name: sha256(root / out / name) for name in DONE} == expected
    assert not list((root / "running" / out).iterdir())  # checkpoints have done their work


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(root, unbroken, number):
    work, expected = unbroken
    out = f"{work}_{number.name}"
    # Every ten minutes, so what is there was saved for the signal.
    with started(work, root, out) as process:
        wait_for(root, out, 3, process)
        os.kill(process.pid, number)
    assert process.exitcode == EXIT_UNFINISHED
    assert not (root / out).exists()
    (saved,) = (root / "running" / out).glob("*/last.safetensors")
    assert load_file(saved)["run.steps"][0] >= 3
    finished(work, root, out)
    assert {name: sha256(root / out / name) for name in DONE} == expected


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGCONT])
def test_a_second_job_waits_for_the_first_and_takes_over_from_one_that_is_killed(
    root, unbroken, fate
):
    work, expected = unbroken
    out = f"{work}_second_{fate.name}"
    with started(work, root, out, OFTEN) as first:
        wait_for(root, out, 3, first)
        os.kill(first.pid, signal.SIGSTOP)
        with started("waiting", work, root, out) as second:
            limit = time.monotonic() + LIMIT
            blocked = re.compile(rf"-> FLOCK +ADVISORY +WRITE +{second.pid} ")
            while not blocked.search(Path("/proc/locks").read_text()):
                assert second.is_alive()
                assert time.monotonic() < limit
                time.sleep(0.01)
            os.kill(first.pid, fate)
    assert second.exitcode == 0
    assert {name: sha256(root / out / name) for name in DONE} == expected
    assert (root / out / "trained-by").exists() == (fate == signal.SIGKILL)
    assert not list((root / "running" / out).iterdir())


@pytest.mark.parametrize("answers", range(4))
def test_a_run_saves_at_whatever_moment_the_signal_comes(root, answers, monkeypatch):
    asked = itertools.count()
    stop = SimpleNamespace(is_set=lambda: next(asked) >= answers)
    monkeypatch.setattr("statecut.recovery.loop.stop_on_signals", lambda: nullcontext(stop))
    out = f"asked_{answers}"
    with pytest.raises(SystemExit, match=str(EXIT_UNFINISHED)):
        training_runs.pretraining(root, out)
    assert list((root / "running" / out).glob("*/last.safetensors"))


def test_the_second_ctrl_c_does_not_wait():
    with stop_on_signals() as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            stop.clear()
            signal.raise_signal(number)
            assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path, {"run": 1}) as checkpoints:
        checkpoints.curve.write_text("step\n")
        yield checkpoints


@pytest.mark.parametrize("left", [0, 50])
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_delete(checkpoints, left):
    checkpoints.save(state(5))
    os.truncate(checkpoints.file, left)
    with pytest.raises(InputError, match=f"cannot be read .*: delete {checkpoints.folder} to"):
        checkpoints.last()


def state(step):
    return {"weight.w": torch.full((1000,), float(step))}


def test_a_full_disk_leaves_the_old_checkpoint(checkpoints):
    """A limit on the size of files makes the write itself fail, as a full disk does."""
    checkpoints.save(state(5))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(InputError, match="the one before is kept: fix that"):
            checkpoints.save(state(10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.last()["weight.w"][0] == 5
    checkpoints.save(state(10))
    assert checkpoints.last()["weight.w"][0] == 10


def test_a_run_belongs_to_one_process(checkpoints, tmp_path):
    with pytest.raises(InputError, match="another process trains this run"):
        Checkpoints(tmp_path, {"run": 1}).__enter__()
    with Checkpoints(tmp_path, {"run": 2}):
        pass  # another run is another folder


def test_one_that_ends_before_it_has_written_anything_is_not_finished(tmp_path):
    waits = Checkpoints(tmp_path, {"run": 1}, wait=True)
    waits.folder.mkdir()
    first = os.open(waits.lock_file, os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_EX)
    threading.Timer(0.1, os.close, [first]).start()
    with waits:
        assert (waits.folder / "run.json").exists()


def test_a_finished_run_goes_away_also_where_open_files_stay(tmp_path, monkeypatch):
    """As on NFS: a file that is deleted while it is open gets another name, and is still there."""
    unlink = os.unlink

    def like_nfs(path, *, dir_fd=None):
        there = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        folder = "" if dir_fd is None else os.path.realpath(f"/proc/self/fd/{dir_fd}")
        if os.path.join(folder, path) in there:
            other = os.path.join(os.path.dirname(path), ".nfs0001")
            os.rename(path, other, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", like_nfs)
    checkpoints = Checkpoints(tmp_path, {})
    (checkpoints.folder / ".last.safetensors.abc").mkdir(parents=True)  # of a killed process
    (checkpoints.folder / ".nfs0000").touch()
    with checkpoints:
        assert {p.name for p in checkpoints.folder.iterdir()} >= {"lock", "run.json"}
        assert not (checkpoints.folder / ".last.safetensors.abc").exists()
        checkpoints.done = True
    assert not checkpoints.folder.exists()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.curve.write_text("step\n")
        checkpoints.save(state(5))
    assert "cannot be locked (No locks available)" in caplog.text
