from keycut.running.job import job

with job(snakemake) as run:
    from keycut.running.archive import write_archive

    write_archive(run, snakemake.output.archive)
