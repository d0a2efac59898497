from keycut.job import job

with job(snakemake) as config:
    from keycut.inputs import Inputs
    from keycut.reporting.figures import draw

    figure, there = snakemake.wildcards.figure, {*snakemake.input.sources}
    sources = [path if path in there else None for path in Inputs(config).all_of_figure(figure)]
    draw(config, figure, sources, [snakemake.output.pdf, snakemake.output.svg])
