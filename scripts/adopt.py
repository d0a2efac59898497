from keycut.running.job import job

with job(snakemake) as run:
    from keycut.models.adoption import adopt

    adopt(
        run.models[snakemake.wildcards.model],
        snakemake.input.tokenizer,
        snakemake.output.model,
    )
