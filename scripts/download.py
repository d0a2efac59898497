from keycut.job import job

with job(snakemake, online=True) as config:
    from keycut.content_check import download_and_check

    report = download_and_check(config)
    print(report.table())
    report.raise_problems()
