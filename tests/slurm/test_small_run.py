"""A small run through Slurm with two faults: the results are those of a run without them."""

from runs import results
from small import RUN, TARGET


def test_a_run_with_faults_gives_what_a_run_without_gives(cluster, short):
    # Two minutes are what training keeps for saving, so that each job makes one of the two steps.
    # One is too little where other work slows the start of a job: Slurm would end it before a step.
    run = short.on(cluster, limits={"pretrain": 2}).start(TARGET)
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
