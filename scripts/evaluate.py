from pathlib import Path

from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    from reproduction.suites.suite import evaluate

    evaluate(
        snakemake.input.model,
        snakemake.wildcards.suite,
        run,
        snakemake.output[0],
        # What another version has finished is not taken up.
        cache=Path(snakemake.params.checkpoints) / "evaluation" / str(VERSION),
        device=run.device,
    )
