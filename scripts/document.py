from keycut.running.job import job

with job(snakemake) as run:
    from keycut.reporting.steps import make_document

    make_document(
        run,
        snakemake.input.tables,
        snakemake.input.figures,
        snakemake.output.tex,
        snakemake.params.templates,
    )
