from reproduction.running.job import job

with job(snakemake, online=True) as run:
    from reproduction.download import download_and_check

    report = download_and_check(run)
    print(report.table())
    report.raise_problems()
