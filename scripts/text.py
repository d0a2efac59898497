from keycut.running.job import job

with job(snakemake):
    from keycut.data.corpora import write_text

    write_text(snakemake.output.text)
