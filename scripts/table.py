from pathlib import Path

from keycut.job import job

with job(snakemake) as config:
    from keycut.reporting.steps import make_table

    make_table(
        config,
        snakemake.wildcards.table,
        snakemake.input.frame,
        Path(snakemake.output.tex).parent,
        snakemake.params.templates,
    )
