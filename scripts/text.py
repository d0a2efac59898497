from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake):
    from reproduction.documentation import documentation_parts, write

    texts = documentation_parts()
    for file, part in zip(snakemake.output, snakemake.params.parts, strict=False):
        write(texts[part], file)
