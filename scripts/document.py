from keycut.job import job

with job(snakemake) as config:
    from keycut.reporting.steps import make_document

    make_document(
        config,
        snakemake.input.tables,
        snakemake.input.figures,
        snakemake.output.tex,
        snakemake.params.templates,
    )
