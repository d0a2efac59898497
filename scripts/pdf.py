from keycut.running.job import job

with job(snakemake):
    from keycut.reporting.writing import compile_document

    compile_document(snakemake.input.tex, snakemake.output.pdf)
