from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    from reproduction.import_model import import_model
    from statecut.models.checkpoint import divide

    import_model(
        run.models[snakemake.wildcards.model],
        snakemake.input.tokenizer,
        snakemake.output[0],
    )
    divide(snakemake.output[0])
