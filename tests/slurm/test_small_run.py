"""A small run through Slurm with two faults: the results are those of a run without them."""

from runs import results
from small import RUN, TARGET


def test_a_run_with_faults_gives_what_a_run_without_gives(cluster, short):
    # Slurm's shortest limit. It is less than what training keeps for saving, so that each job
    # makes one of the two steps.
    run = short.on(cluster, limits={"pretrain": 1}).start(TARGET)
    undisturbed = short.undisturbed()
    cancelled = run.until_training("recover")
    cluster.run("scancel", cancelled)
    assert run.wait() == 0, run.log

    assert results(run.folder, RUN) == undisturbed
    states = [job["JobState"] for job in run.ended()]
    assert states.count("CANCELLED") == 1
    assert states.count("PENDING") == 1  # queued again by itself
    assert states.count("COMPLETED") == len(states) - 2
    log = next(run.folder.glob(f"results/{RUN}/logs/pretrain/*.log")).read_text()
    assert "resumes from step 1" in log
