"""Every fault that a cluster has, while training and evaluation run. By hand: make test-slurm.

In every case the run ends with the results of an undisturbed one.
"""

import signal
import subprocess
import time

import pytest
from cluster import GPUS, NODES
from runs import results, run_here
from small import RUN, TRAINED


@pytest.fixture(scope="module")
def undisturbed(prepared):
    # Copies are made of what was prepared, before the rest of the run is added to it.
    reference = prepared.on(None)
    run_here(reference.folder, TRAINED)
    return results(reference.folder, RUN)


@pytest.fixture
def run(cluster, prepared, undisturbed):
    run = prepared.on(cluster)
    yield run
    run.stop()


@pytest.fixture
def ends_as_ever(run, undisturbed):
    def check():
        assert run.wait() == 0, run.log
        found = results(run.folder, RUN)
        assert TRAINED.removeprefix(f"results/{RUN}/") in found
        assert found == undisturbed

    return check


def states_of(cluster, job):
    return [one["JobState"] for one in cluster.ended() if one["JobId"] == job]


@pytest.mark.parametrize(
    ("command", "states"),
    [(["scancel"], ["CANCELLED"]), (["scontrol", "requeue"], ["PENDING", "COMPLETED"])],
)
def test_stopped_while_training_and_evaluating(cluster, run, ends_as_ever, command, states):
    run.start(TRAINED)
    stopped = []
    for find in (lambda: run.until_training("pretrain"), run.until_evaluating):
        stopped.append(find())
        cluster.run(*command, stopped[-1])
    ends_as_ever()
    assert [states_of(cluster, job) for job in stopped] == [states] * 2


def test_preempted_while_training(cluster, run, ends_as_ever):
    run.start(TRAINED)
    preempted = run.until_training("pretrain")
    urgent = [
        cluster.run("sbatch", "--parsable", "--partition=urgent", "--nodelist", node,
                    f"--gpus={GPUS}", "--mem=1000", "--output=/dev/null", "--wrap=sleep 20")
        for node in NODES
    ]  # fmt: skip
    ends_as_ever()
    assert states_of(cluster, preempted)[-1] == "COMPLETED"
    assert len(states_of(cluster, preempted)) == 2
    assert [states_of(cluster, job) for job in urgent] == [["COMPLETED"]] * 2


def test_a_lost_node_runs_nothing_twice_at_once(cluster, run, ends_as_ever):
    run.start(TRAINED)
    lost = run.until_training("pretrain")
    node = cluster.run("squeue", "-h", f"--jobs={lost}", "-o", "%N")
    log = run.folder / f"results/{RUN}/logs/pretrain/delta_net.log"
    cluster.kill_node(node)  # its jobs live on, unseen
    with run.held(lost):  # it must not be ready before the controller gives its node up
        run.until(
            lambda: log.exists() and "this one waits for it" in log.read_text(),
            "a second job to wait",
        )
        assert cluster.run("squeue", "-h", f"--jobs={lost}", "-o", "%N") != node
    ends_as_ever()
    assert states_of(cluster, lost)[-1] == "COMPLETED"
    cluster.start_node(node)
    cluster.wait_until_idle()


def test_a_controller_that_is_away_for_a_minute(cluster, run, ends_as_ever):
    run.start(TRAINED)
    run.until_training("pretrain")
    cluster.kill_controller()
    time.sleep(70)
    cluster.start_controller()
    ends_as_ever()


def test_snakemake_stopped_by_ctrl_c_and_started_again(cluster, run, ends_as_ever):
    run.start(TRAINED)
    job = run.until_training("pretrain")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(300) != 0
    cluster.wait(lambda: states_of(cluster, job) == ["CANCELLED"], "its job to be cancelled")
    run.start(TRAINED)
    ends_as_ever()
    log = run.folder / f"results/{RUN}/logs/pretrain/delta_net.log"
    assert "resumes from step" in log.read_text()


def test_snakemake_told_to_end_and_started_again(cluster, run, ends_as_ever):
    """It waits for its jobs and submits no more."""
    run.start(TRAINED)
    job = run.until_training("pretrain")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(1800) != 0
    assert states_of(cluster, job) == ["COMPLETED"]
    run.start(TRAINED)
    ends_as_ever()


def test_snakemake_killed_unlocked_and_started_again(cluster, run, ends_as_ever):
    """Even without the scancel that the documentation asks for: the second job waits."""
    run.start(TRAINED)
    run.until_training("pretrain")
    run.process.kill()
    run.process.wait()
    unlock = subprocess.run(
        [*run.command(), "--unlock"], cwd=run.folder, env=run.environment(), capture_output=True
    )
    assert unlock.returncode == 0, unlock.stderr
    run.start(TRAINED)
    ends_as_ever()


@pytest.fixture
def little_room(run):
    """The run's results on a disk of their own, of 64 MB."""
    folder = run.folder / "results" / RUN
    kept = folder.rename(folder.with_name("kept"))
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder])
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root alone")
    subprocess.run(["cp", "-a", f"{kept}/.", folder], check=True)
    yield folder
    run.stop()
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(run, little_room, ends_as_ever):
    filler = little_room / "filler"
    run.start(TRAINED, retries=0)
    run.until_training("pretrain")
    filled = subprocess.run(["dd", "if=/dev/zero", f"of={filler}"], capture_output=True, text=True)
    assert "No space left" in filled.stderr
    assert run.wait() != 0
    assert "No space left" in run.log
    assert "results/slurm/rule_pretrain/" in run.log  # the log's path
    filler.unlink()
    run.start(TRAINED)
    ends_as_ever()
