from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.figures import draw

    draw(run, snakemake.wildcards.figure, snakemake.params.sources, snakemake.output)
