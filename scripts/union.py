from reproduction.running.job import job

with job(snakemake):
    from reproduction.reporting.frame import make_union

    make_union(snakemake.input.frames, snakemake.output.frame)
