"""GPUs of one machine, shared out between jobs."""

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from reproduction.running import gpus
from reproduction.running.gpus import gpus_taken, require_gpus
from statecut.errors import InputError


@pytest.fixture(autouse=True)
def four(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def test_two_jobs_at_once_see_different_gpus():
    with gpus_taken(1) as first:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"  # as another process would have it
        with gpus_taken(2) as second:
            assert (first, second) == (["4"], ["5", "6"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


@pytest.mark.parametrize("per_gpu", [1, 3, 4])
def test_at_no_moment_is_more_of_a_gpu_used_than_there_is(monkeypatch, per_gpu):
    """Threads stand for processes: each has its own view, and its own locks."""
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["4", "5", "6", "7"])
    monkeypatch.setattr(gpus, "WAIT", 0.001)
    used, most, guard = Counter(), [], threading.Lock()

    def work(slots):
        with gpus_taken(slots, per_gpu=per_gpu) as mine:
            assert len(mine) == max(1, slots // per_gpu)
            of_each = min(slots, per_gpu)
            with guard:
                used.update(dict.fromkeys(mine, of_each))
                most.append(max(used.values()))
            time.sleep(0.005)
            with guard:
                used.subtract(dict.fromkeys(mine, of_each))

    def jobs():
        for slots in (1, 2 * per_gpu, per_gpu, 4 * per_gpu, max(1, per_gpu - 1)):
            work(slots)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(jobs) for _ in range(4)]:
            done.result(30)
    assert len(most) == 20
    assert max(most) == per_gpu


@pytest.mark.parametrize(
    ("slots", "per_gpu", "message"),
    [(5, 1, "5 GPUs are asked for, this machine has 4"), (6, 4, "6 slots are asked for")],
)
def test_what_there_is_not_is_an_error(slots, per_gpu, message):
    with pytest.raises(InputError, match=message):
        gpus_taken(slots, per_gpu=per_gpu).__enter__()


def test_a_job_that_asks_for_none_sees_none(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # some containers have GPUs that only torch sees
    with gpus_taken(0) as mine:
        assert mine == []
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_slurm_job_keeps_its_own_and_jobs_inside_an_allocation_share_it(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with gpus_taken(4) as mine:
        assert mine == ["4", "5", "6", "7"]
    with gpus_taken(1) as first:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        with gpus_taken(1) as second:
            assert (first, second) == (["4"], ["5"])
        # Another allocation may have other GPUs under the same names.
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        with gpus_taken(1) as third:
            assert third == ["4"]


def test_fewer_than_were_asked_for_are_not_enough(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    require_gpus("pretrain", 2)
    with pytest.raises(InputError, match=r"rule pretrain asks for 4 GPUs: torch can use 2"):
        require_gpus("pretrain", 4)
