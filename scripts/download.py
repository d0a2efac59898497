from reproduction.running.job import job

with job(snakemake, online=True) as run:
    from reproduction.download import download_and_check
    from statecut.errors import InputError

    table, problems = download_and_check(run)
    print(table)
    if problems:
        raise InputError(problems)
