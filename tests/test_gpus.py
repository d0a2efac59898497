"""GPUs of one machine, shared out between jobs."""

import os
import threading
import time

import pytest

from keycut.errors import InputError
from keycut.gpus import gpus_taken, visible_gpus


@pytest.fixture(autouse=True)
def four(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def test_two_jobs_at_once_see_different_gpus(tmp_path):
    with gpus_taken(1, locks=tmp_path) as first:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"  # as another process would have it
        with gpus_taken(2, locks=tmp_path) as second:
            assert first == ["4"]
            assert second == ["5", "6"]
    assert visible_gpus() == ["4", "5", "6", "7"]


def test_at_no_moment_is_a_gpu_used_twice(tmp_path):
    used, seen, guard = set(), [], threading.Lock()

    def work(count):
        # Each thread is a job: its own view of the machine, its own locks.
        with gpus_taken(count, locks=tmp_path) as mine:
            with guard:
                assert not used & {*mine}
                used.update(mine)
                seen.append(len(used))
            time.sleep(0.01)
            with guard:
                used.difference_update(mine)

    def jobs():
        for count in (1, 2, 3, 4, 1):
            work(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keycut.gpus.visible_gpus", lambda: ["4", "5", "6", "7"])
        patch.setattr("keycut.gpus.WAIT", 0.001)
        threads = [threading.Thread(target=jobs) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(seen) == 20
    assert max(seen) <= 4


def test_more_than_there_are_is_an_error(tmp_path):
    with (
        pytest.raises(InputError, match="5 GPUs are asked for, this machine has 4"),
        gpus_taken(5, locks=tmp_path),
    ):
        pass


def test_a_job_that_asked_for_none_sees_none(tmp_path):
    with gpus_taken(0, locks=tmp_path) as mine:
        assert mine == []
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_machine_without_gpus_runs_on_its_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with gpus_taken(8, locks=tmp_path) as mine:
        assert mine == []


def test_a_job_of_a_cluster_keeps_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with gpus_taken(1, locks=tmp_path) as mine:
        assert mine == ["4", "5", "6", "7"]
    assert not list(tmp_path.iterdir())
