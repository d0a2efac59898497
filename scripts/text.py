from reproduction.running.job import job

with job(snakemake):
    from reproduction.corpora import write_text

    parts = snakemake.params.parts
    write_text(dict(zip(snakemake.output[: len(parts)], parts, strict=True)))
