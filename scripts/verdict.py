from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.frame import make_union
    from reproduction.reporting.verdict import make_verdict

    make_union(snakemake.input, snakemake.output.frame)
    make_verdict(run, snakemake.input, snakemake.output.folder)
