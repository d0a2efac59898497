from pathlib import Path

from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    from reproduction.corpora import pack_corpus
    from statecut.data.tokenizer import load_tokenizer

    pack_corpus(
        run,
        snakemake.wildcards.corpus,
        load_tokenizer(snakemake.input.tokenizer),
        Path(snakemake.output[0]),
        text=Path(snakemake.input.text[0]) if snakemake.input.text else None,
        workers=snakemake.threads,
    )
