from keycut.job import job

with job(snakemake) as config:
    from keycut.inputs import Inputs
    from keycut.reporting.steps import make_frame

    table, there = snakemake.wildcards.table, {*snakemake.input.sources}
    sources = [path if path in there else None for path in Inputs(config).all_of_table(table)]
    make_frame(config, table, sources, snakemake.output.frame)
