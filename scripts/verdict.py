from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.verdict import make_verdict

    make_verdict(
        run,
        snakemake.input.frames,
        snakemake.output.folder,
        Path(snakemake.input.published[0]).parent,
        snakemake.input.claims,
    )
