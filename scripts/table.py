from pathlib import Path

from keycut.running.job import job

with job(snakemake) as run:
    from keycut.reporting.writing import write_table

    write_table(
        run,
        snakemake.wildcards.table,
        snakemake.input.frame,
        Path(snakemake.output.tex).parent,
        snakemake.params.templates,
    )
