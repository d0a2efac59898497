from reproduction.running.job import job

with job(snakemake):
    from reproduction.reporting.writing import compile_document

    compile_document(snakemake.input.tex, snakemake.output[0])
