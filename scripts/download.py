from keycut.job import job

with job(snakemake, online=True) as config:
    from keycut.hub import DOWNLOADS, LOCK, download

    download(config.hub_sources(), DOWNLOADS, LOCK)
