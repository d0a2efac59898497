from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake):
    from reproduction.corpora import write_text

    parts = snakemake.params.parts
    write_text(dict(zip(snakemake.output[: len(parts)], parts, strict=True)))
