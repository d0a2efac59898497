"""GPUs of one machine, shared out between jobs."""

import os
import threading
import time
from collections import Counter

import pytest

from reproduction.running.gpus import driver_version, gpus_taken, require_gpus, visible_gpus
from statecut.errors import InputError


@pytest.fixture(autouse=True)
def four(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def at_once(monkeypatch, works, gpus=("4", "5", "6", "7")):
    """Run each work in a thread of its own, which stands for a process: its own view, its locks."""
    monkeypatch.setattr("reproduction.running.gpus.visible_gpus", lambda: list(gpus))
    monkeypatch.setattr("reproduction.running.gpus.WAIT", 0.001)
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_two_jobs_at_once_see_different_gpus(tmp_path):
    with gpus_taken(1, locks=tmp_path) as first:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"  # as another process would have it
        with gpus_taken(2, locks=tmp_path) as second:
            assert first == ["4"]
            assert second == ["5", "6"]
    assert visible_gpus() == ["4", "5", "6", "7"]


@pytest.mark.parametrize("shares", [1, 3, 4])
def test_at_no_moment_is_more_of_a_gpu_used_than_there_is(tmp_path, monkeypatch, shares):
    used, most, guard = Counter(), [], threading.Lock()

    def work(asked):
        with gpus_taken(asked, shares=shares, locks=tmp_path) as mine:
            assert len(mine) == max(1, asked // shares)
            of_each = min(asked, shares)
            with guard:
                used.update(dict.fromkeys(mine, of_each))
                most.append(max(used.values()))
            time.sleep(0.005)
            with guard:
                used.subtract(dict.fromkeys(mine, of_each))

    def jobs():
        for asked in (1, 2 * shares, shares, 4 * shares, max(1, shares - 1)):
            work(asked)

    at_once(monkeypatch, [jobs] * 4)
    assert len(most) == 20
    assert max(most) == shares


def test_shares_are_used_side_by_side_and_a_whole_gpu_alone(tmp_path, monkeypatch):
    inside, beside, guard = [], [], threading.Lock()
    met = threading.Barrier(4)  # four jobs of one share each are on a GPU at once, or this breaks

    def sharing():
        with gpus_taken(1, shares=4, locks=tmp_path):
            met.wait(10)
            with guard:
                inside.append("part")
            time.sleep(0.01)
            with guard:
                inside.remove("part")

    def alone():
        with gpus_taken(4, shares=4, locks=tmp_path):
            with guard:
                beside.append(list(inside))
                inside.append("whole")
            time.sleep(0.01)
            with guard:
                inside.remove("whole")

    at_once(monkeypatch, [alone, *[sharing] * 4, alone], gpus=["4"])
    assert beside == [[], []]
    assert not met.broken


def test_a_run_without_shares_leaves_those_of_another_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("reproduction.running.gpus.visible_gpus", lambda: ["4", "5"])
    with gpus_taken(1, shares=8, locks=tmp_path) as part, gpus_taken(1, locks=tmp_path) as whole:
        assert (part, whole) == (["4"], ["5"])


def test_more_than_there_are_is_an_error(tmp_path):
    with (
        pytest.raises(InputError, match="5 GPUs are asked for, this machine has 4"),
        gpus_taken(5, locks=tmp_path),
    ):
        pass


def test_one_and_a_half_gpus_are_an_error(tmp_path):
    with (
        pytest.raises(InputError, match="6 shares of GPUs are asked for, and each has 4"),
        gpus_taken(6, shares=4, locks=tmp_path),
    ):
        pass


@pytest.mark.parametrize("shares", [1, 4])
def test_a_job_that_asked_for_none_sees_none(tmp_path, shares):
    with gpus_taken(0, shares=shares, locks=tmp_path) as mine:
        assert mine == []
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_where_none_is_seen_nothing_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with gpus_taken(8, shares=4, locks=tmp_path) as mine:
        assert mine == []
    # Some containers have GPUs that only torch sees: they are hidden from who asked for none.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("reproduction.running.gpus.visible_gpus", list)
    with gpus_taken(1, locks=tmp_path):
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with gpus_taken(0, locks=tmp_path):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_fewer_than_were_asked_for_are_not_enough(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    require_gpus("pretrain", 2)
    require_gpus("pretrain", 8, shares=4)
    with pytest.raises(InputError, match=r"rule pretrain asks for 4 GPUs, and torch can use 2 "):
        require_gpus("pretrain", 4)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
    ],
)
def test_the_kernel_names_the_driver(tmp_path, monkeypatch, said, version):
    file = tmp_path / "version"
    file.write_text(f"NVRM version: {said}\nGCC version:  gcc version 12.3.0\n")
    monkeypatch.setattr("reproduction.running.gpus.DRIVER", file)
    assert driver_version() == version


def test_a_job_of_a_cluster_keeps_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for asked, shares in ((4, 1), (8, 2), (8, 1)):
        with gpus_taken(asked, shares=shares, locks=tmp_path) as mine:
            assert mine == ["4", "5", "6", "7"]
    assert not list(tmp_path.iterdir())


def test_jobs_inside_an_allocation_share_it_out_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with gpus_taken(1) as first:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        with gpus_taken(1) as second:
            assert (first, second) == (["4"], ["5"])
        # Another allocation may have other GPUs under the same names.
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        with gpus_taken(1) as third:
            assert third == ["4"]
