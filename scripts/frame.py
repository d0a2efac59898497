from keycut.job import job

with job(snakemake) as config:
    from keycut.reporting.steps import make_frame

    make_frame(config, snakemake.wildcards.table, snakemake.input.sources, snakemake.output.frame)
