from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.running.import_model import import_model

    import_model(
        run.models[snakemake.wildcards.model],
        snakemake.input.tokenizer,
        snakemake.output.model,
    )
