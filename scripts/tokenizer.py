from pathlib import Path

from keycut.running.job import job

with job(snakemake) as run:
    from keycut.data.corpora import make_tokenizer
    from keycut.hub import DOWNLOADS, LOCK

    make_tokenizer(
        run,
        snakemake.wildcards.tokenizer,
        Path(snakemake.output.folder),
        downloads=DOWNLOADS,
        lock=LOCK,
        text=Path(snakemake.input.text[0]) if snakemake.input.text else None,
        force=True,
    )
