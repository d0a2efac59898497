from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.writing import write_table

    write_table(
        run,
        snakemake.wildcards.table,
        snakemake.input.frame,
        Path(snakemake.output.tex).parent,
        snakemake.params.templates,
    )
