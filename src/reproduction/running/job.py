"""What every job of the workflow does around its work.

    with job(snakemake) as run:
        from statecut.something import work
        work(run.section, snakemake.input.thing, snakemake.output.thing)

`run` holds the sections of the configuration that the rule passes in its parameter `settings`; a
script knows nothing else of it. Around the block:

- output goes to the job's log, and the hub is switched off;
- no other job works on the same outputs at the same time, and what a killed one left is removed;
- code, user files and inputs are checked to be those that the job was planned with;
- GPUs are shared out, and a job ends at once if torch cannot use those that its rule asks for;
- a Slurm job whose time is up is requeued;
- the provenance of the first output is written beside it.

Imports stand inside the block, so that a fork server can take the job over before them. For the
same reason all of the above is in job_context.py, which is imported after that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from reproduction.running import forkserver
from statecut import logs

if TYPE_CHECKING:
    from reproduction.config import JobConfig


def job(snakemake: Any, *, online: bool = False) -> AbstractContextManager[JobConfig]:
    """What stands around the work of a rule's script; a fork server gets the job before that."""
    logs.start("reproduction")
    if snakemake.threads == 1:
        forkserver.hand_over(stays=snakemake.rule in forkserver.STAY)
    from reproduction.running.job_context import job_context

    return job_context(snakemake, online=online)
