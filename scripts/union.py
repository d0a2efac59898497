from keycut.running.job import job

with job(snakemake):
    from keycut.reporting.frame import make_union

    make_union(snakemake.input.frames, snakemake.output.frame)
