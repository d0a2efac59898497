from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.archive import write_archive

    write_archive(run, snakemake.output[0])
