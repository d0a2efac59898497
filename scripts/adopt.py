from keycut.job import job

with job(snakemake) as config:
    from keycut.hub import DOWNLOADS, LOCK
    from keycut.models.adoption import adopt

    adopt(
        config.models[snakemake.wildcards.model],
        snakemake.input.tokenizer,
        snakemake.output.model,
        downloads=DOWNLOADS,
        lock=LOCK,
    )
