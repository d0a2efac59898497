from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.frame import make_frame

    make_frame(run, snakemake.wildcards.table, snakemake.params.sources, snakemake.output.frame)
