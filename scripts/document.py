from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.writing import write_document
    from reproduction.running.code import ROOT

    write_document(
        run,
        snakemake.input.tables,
        snakemake.input.figures,
        snakemake.output[0],
        ROOT / "workflow/templates",
    )
