from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.frame import make_frame
    from reproduction.reporting.writing import write_table

    table, out = snakemake.wildcards.table, snakemake.output
    make_frame(run, table, snakemake.params.sources, out.frame)
    write_table(run, table, out.frame, Path(out.tex).parent)
