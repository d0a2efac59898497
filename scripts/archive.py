from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.running.archive import write_archive

    write_archive(run, snakemake.output.archive)
