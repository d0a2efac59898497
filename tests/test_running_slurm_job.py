"""What a job does with the Slurm job that it runs in; Slurm's commands are faked."""

import os
import threading
from types import SimpleNamespace

import pytest

from reproduction.running import slurm as running_slurm
from reproduction.running.slurm import (
    END,
    EXIT_UNFINISHED,
    export_end_time,
    refused_for_good,
    requeue_at_time_limit,
    stuck_jobs,
    warn_of_jobs_that_never_start,
)
from reproduction.running.snakemake_fixes import (
    LOG_LINES,
    LOG_WIDTH,
    fail_refused_jobs,
    remember_min_job_age,
    show_ends_of_logs,
)
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

    answer.called = lambda: (
        (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
    )
    return answer


def leave(code, rule="pretrain"):
    with pytest.raises(SystemExit), requeue_at_time_limit(rule):
        raise SystemExit(code)


def test_it_is_the_code_that_training_leaves_with():
    assert EXIT_UNFINISHED == loop.EXIT_UNFINISHED


def test_the_end_of_the_job_is_where_training_looks(slurm):
    slurm("squeue", "1794720000")
    export_end_time()
    assert loop.last_moment() == 1794720000 - loop.RESERVE


@pytest.mark.parametrize(("answer", "code"), [("NONE", 0), ("N/A", 0), ("", 0), ("", 1)])
def test_without_a_limit_or_an_answer_a_job_has_no_end(slurm, answer, code):
    slurm("squeue", answer, code)
    export_end_time()
    assert END not in os.environ


def test_slurms_own_word_is_taken(slurm, monkeypatch):
    monkeypatch.setenv(END, "12")
    export_end_time()
    assert os.environ[END] == "12"


def test_what_goes_on_later_goes_back_into_the_queue(slurm):
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


def test_what_has_ended_otherwise_asks_nothing(slurm):
    leave(1)
    assert slurm.called() == ""


def test_where_it_is_refused_the_job_fails_and_is_tried_again(slurm, caplog):
    slurm("squeue", "RUNNING rule_pretrain")
    slurm("scontrol", "", code=1)
    leave(EXIT_UNFINISHED)
    assert "scontrol requeue 7" in caplog.text
    assert "goes back" not in caplog.text


def test_without_slurm_nothing_is_asked(slurm, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID")
    export_end_time()
    leave(EXIT_UNFINISHED)
    assert slurm.called() == ""


def test_the_plugin_remembers_how_long_ended_jobs_are_visible(slurm, monkeypatch):
    import snakemake_executor_plugin_slurm as plugin

    monkeypatch.setattr(plugin, "get_min_job_age", plugin.get_min_job_age)  # put back afterwards
    remember_min_job_age(plugin)
    slurm("scontrol", "", code=1)
    assert plugin.get_min_job_age() is None
    slurm("scontrol", "MinJobAge = 300 sec")
    assert plugin.get_min_job_age() == 300
    slurm("scontrol", "", code=1)
    assert plugin.get_min_job_age() == 300


def test_every_log_of_a_failed_job_is_shown_to_its_end(tmp_path, monkeypatch):
    from snakemake import logging

    monkeypatch.setattr(logging, "show_logs", logging.show_logs)  # put back afterwards
    show_ends_of_logs()
    empty, missing, slurms = (tmp_path / name for name in ("empty", "missing", "slurms"))
    empty.touch()
    lines = ["Command: " + "x" * 5000, *map(str, range(100)), "No space left on device"]
    slurms.write_text("\n".join(lines))
    shown = list(logging.show_logs([str(empty), str(missing), str(slurms)]))
    assert shown[:3] == [
        f"Logfile {empty}: empty file", f"Logfile {missing} not found.", f"Logfile {slurms}:"
    ]  # fmt: skip
    assert shown[-2] == "No space left on device"
    assert len(shown) == 3 + LOG_LINES
    assert max(map(len, shown)) <= LOG_WIDTH


def waiting(number, reason, state="PENDING", comment="rule_tokens_wildcards_demo"):
    return f"{number}|{state}|{reason}|cpu|12:00:00|{comment}\n"


@pytest.mark.parametrize(
    "reason",
    ["PartitionTimeLimit", "BadConstraints", "QOSMaxWallDurationPerJobLimit", "QOSMinGRES",
     "AssocGrpCPUMinutesLimit"],
)  # fmt: skip
def test_a_job_that_never_starts_is_named_once(reason):
    known = set()
    (line,) = stuck_jobs(waiting(7, reason), known)
    assert line.startswith(
        f"Slurm job 7 (rule tokens; 12:00:00 in partition cpu): will never start, {reason}. "
    )
    assert list(stuck_jobs(waiting(7, reason), known)) == []
    assert len(list(stuck_jobs(waiting(8, reason), known))) == 1


@pytest.mark.parametrize(
    "reason",
    ["None", "Priority", "Resources", "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved"],
)
def test_a_wait_that_can_end_is_not_named(reason):
    assert list(stuck_jobs(waiting(7, reason), set())) == []


@pytest.mark.parametrize(
    "reason",
    ["QOSMaxGRESPerUser", "AssocGrpCPURunMinutesLimit", "MaxGRESPerAccount", "AccountingPolicy"],
)
def test_a_limit_is_named_when_no_job_is_left_whose_end_would_help(reason):
    known = set()
    for state in ("RUNNING", "CONFIGURING", "COMPLETING"):
        assert list(stuck_jobs(waiting(6, "None", state) + waiting(7, reason), known)) == []
    assert list(stuck_jobs("slurm_load_jobs error\n", known)) == []
    (line,) = stuck_jobs(waiting(7, reason), known)
    assert f"waits, {reason}, while no job of this run runs" in line


@pytest.mark.parametrize("reason", ["JobHeldUser", "launch_failed_requeued_held"])
def test_a_held_job_is_named_with_what_lets_it_go(reason):
    (line,) = stuck_jobs(waiting(7, reason) + waiting(8, reason), set())
    assert "Slurm job 7 and 1 more (rule tokens;" in line
    assert "`scontrol release 7,8`" in line


@pytest.mark.parametrize(
    ("message", "for_good"),
    [
        ("Requested time limit is invalid (missing or exceeds some limit)", True),
        ("Invalid account or account/partition combination specified", True),
        ("AssocMaxWallDurationPerJobLimit\nsbatch: error: Job violates accounting policy", True),
        ("QOSMaxSubmitJobPerUserLimit\nsbatch: error: Job violates accounting/QOS policy", False),
        ("Unable to contact slurm controller (connect failure)", False),
        ("Required partition not available (inactive or drain)", False),
    ],
)
def test_a_refused_job_is_tried_again_only_if_that_may_help(monkeypatch, message, for_good):
    import snakemake_executor_plugin_slurm as plugin

    reported = []
    name = "_report_job_error_threadsafe"
    monkeypatch.setattr(plugin.Executor, name, lambda *given: reported.append(given))
    fail_refused_jobs(plugin)
    job = SimpleNamespace(restart_times=2, _attempt=1)
    text = (
        f"The error message was 'sbatch: error: {message}'. sbatch call: sbatch -t 9 --wrap=python"
    )
    plugin.Executor._report_job_error_threadsafe(None, SimpleNamespace(job=job), text)

    assert refused_for_good(message) == for_good
    assert job._attempt == (3 if for_good else 1)  # Snakemake restarts up to restart_times
    ((_, _, shown),) = reported
    assert message in shown
    assert "sbatch -t 9" in shown
    assert "python" not in shown
    assert ("It is not tried again" in shown) == for_good


def test_the_queue_of_this_run_is_watched(slurm, monkeypatch):
    import snakemake_executor_plugin_slurm as plugin

    monkeypatch.setattr(running_slurm, "WATCH_EVERY", 0.05)
    slurm("squeue", waiting(7, "PartitionTimeLimit").strip())
    executor = plugin.Executor.__new__(plugin.Executor)
    executor.run_uuid = "the-run"
    lines, warned = [], threading.Event()

    def warn(line):
        lines.append(line)
        warned.set()

    warn_of_jobs_that_never_start(object(), warn)  # of another kind: not asked about
    warn_of_jobs_that_never_start(executor, warn)
    assert warned.wait(60)
    assert "Slurm job 7 (rule tokens;" in lines[0]
    assert "--name=the-run" in slurm.called()
