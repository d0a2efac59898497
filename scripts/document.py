from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.writing import compile_document, write_document

    inputs, (document, *pdf) = snakemake.input, snakemake.output
    write_document(run, inputs.tables, inputs.figures, document)
    if pdf:  # where there is a LaTeX to make it
        compile_document(document, *pdf)
