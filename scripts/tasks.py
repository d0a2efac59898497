from pathlib import Path

from reproduction.running.job import job

with job(snakemake):
    from reproduction.suites.demo import make_demo_tasks

    make_demo_tasks(
        snakemake.input.tokens,
        snakemake.input.tokenizer,
        Path(snakemake.output[0]).parent,
        slice_name=snakemake.params.data.split("/")[1],
        force=True,
    )
