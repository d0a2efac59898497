from keycut.job import job

with job(snakemake) as config:
    from keycut.reporting.figures import draw

    draw(
        config,
        snakemake.wildcards.figure,
        snakemake.input.sources,
        [snakemake.output.pdf, snakemake.output.svg],
    )
