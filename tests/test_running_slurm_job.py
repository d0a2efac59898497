"""What a job does with the Slurm job that it runs in; Slurm's commands are faked."""

import os

import pytest

from reproduction.running.slurm import (
    END,
    EXIT_UNFINISHED,
    export_end_time,
    requeue_at_time_limit,
)
from reproduction.running.snakemake_fixes import remember_min_job_age
from statecut.recovery import loop


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands that answer as they are told, and note how they were called."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    # Set and taken away again, so that what a test adds is taken away too.
    monkeypatch.setenv(END, "0")
    monkeypatch.delenv(END)

    def answer(command, text, code=0):
        script = tmp_path / command
        script.write_text(
            f"#!/bin/sh\necho {command} $* >> {tmp_path}/called\necho '{text}'\nexit {code}\n"
        )
        script.chmod(0o755)

    (tmp_path / "called").touch()
    answer.called = (tmp_path / "called").read_text
    return answer


def leave(code, rule="pretrain"):
    with pytest.raises(SystemExit), requeue_at_time_limit(rule):
        raise SystemExit(code)


def test_the_end_of_the_job_is_where_training_looks(slurm, monkeypatch):
    slurm("squeue", "1794720000")
    export_end_time()
    assert loop.last_moment() == 1794720000 - loop.RESERVE
    monkeypatch.setenv(END, "12")  # Slurm's own word is taken
    export_end_time()
    assert os.environ[END] == "12"


@pytest.mark.parametrize(("answer", "code"), [("NONE", 0), ("N/A", 0), ("", 0), ("", 1)])
def test_without_a_limit_or_an_answer_a_job_has_no_end(slurm, answer, code):
    slurm("squeue", answer, code)
    export_end_time()
    assert END not in os.environ


def test_what_goes_on_later_goes_back_into_the_queue(slurm):
    assert EXIT_UNFINISHED == loop.EXIT_UNFINISHED  # the code that training leaves with
    slurm("squeue", "RUNNING rule_pretrain_wildcards_delta_net")
    slurm("scontrol", "")
    leave(EXIT_UNFINISHED)
    assert slurm.called().endswith("scontrol requeue 7\n")


@pytest.mark.parametrize(
    "answer",
    [
        "COMPLETING rule_pretrain",  # cancelled, preempted or out of time
        "RUNNING (null)",  # someone's own job, with a whole Snakemake in it
        "RUNNING rule_pretrained_wildcards_x",
    ],
)
def test_what_is_not_ours_to_queue_is_left_alone(slurm, answer):
    slurm("squeue", answer)
    leave(EXIT_UNFINISHED)
    assert "scontrol" not in slurm.called()


def test_where_it_is_refused_the_job_fails_and_is_tried_again(slurm, caplog):
    slurm("squeue", "RUNNING rule_pretrain")
    slurm("scontrol", "", code=1)
    leave(EXIT_UNFINISHED)
    assert "scontrol requeue 7" in caplog.text
    assert "goes back" not in caplog.text


def test_without_slurm_or_after_another_end_nothing_is_asked(slurm, monkeypatch):
    leave(1)
    monkeypatch.delenv("SLURM_JOB_ID")
    export_end_time()
    leave(EXIT_UNFINISHED)
    assert slurm.called() == ""


def test_the_plugin_remembers_how_long_ended_jobs_are_visible(slurm, monkeypatch):
    import snakemake_executor_plugin_slurm as plugin

    monkeypatch.setattr(plugin, "get_min_job_age", plugin.get_min_job_age)  # put back afterwards
    remember_min_job_age()
    slurm("scontrol", "", code=1)
    assert plugin.get_min_job_age() is None
    slurm("scontrol", "MinJobAge = 300 sec")
    assert plugin.get_min_job_age() == 300
    slurm("scontrol", "", code=1)
    assert plugin.get_min_job_age() == 300
