from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.corpora import make_tokenizer

    make_tokenizer(
        run,
        snakemake.wildcards.tokenizer,
        Path(snakemake.output.folder),
        text=Path(snakemake.input.text[0]) if snakemake.input.text else None,
        force=True,
    )
