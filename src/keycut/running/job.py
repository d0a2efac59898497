"""What every job of the workflow does around its work.

    with job(snakemake) as run:
        from keycut.something import work
        work(run.section, snakemake.input.thing, snakemake.output.thing)

`run` holds the sections of the configuration that the rule passes in its parameter `settings`; a
script knows nothing else of it. Around the block:

- output goes to the job's log, and the hub is switched off;
- no other job works on the same outputs at the same time, and what a killed one left is removed;
- code, user files and inputs are checked to be those that the job was planned with;
- GPUs are shared out, and a job ends at once if torch cannot use those that its rule asks for;
- a Slurm job whose time is up is requeued;
- the provenance of the first output is written beside it.

Imports stand inside the block, so that a fork server can take the job over before them. Here, too:
a script that hands its job over needs none of job_context.py, whose imports take longer than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from keycut import logs
from keycut.running import forkserver

if TYPE_CHECKING:
    from keycut.config import JobConfig


@contextmanager
def job(snakemake: Any, *, online: bool = False) -> Iterator[JobConfig]:
    """Around the work of a rule's script."""
    logs.start()
    if snakemake.threads == 1:
        forkserver.hand_over()
    from keycut.running.job_context import job_context

    with job_context(snakemake, online=online) as run:
        yield run
