from keycut.running.job import job

with job(snakemake):
    from keycut.reporting.steps import make_union

    make_union(snakemake.input.frames, snakemake.output.frame)
