from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.writing import write_document

    write_document(
        run,
        snakemake.input.tables,
        snakemake.input.figures,
        snakemake.output.tex,
        snakemake.params.templates,
    )
