from contextlib import redirect_stderr
from pathlib import Path

from keycut.config import parse_config
from keycut.data.corpora import pack_corpus
from keycut.data.tokenizer import load_tokenizer
from keycut.hub import DOWNLOADS, LOCK

with open(snakemake.log[0], "w", buffering=1) as log, redirect_stderr(log):
    pack_corpus(
        parse_config(snakemake.config, "the configuration"),
        snakemake.wildcards.corpus,
        load_tokenizer(snakemake.input.tokenizer),
        Path(snakemake.output[0]),
        downloads=DOWNLOADS,
        lock=LOCK,
        workers=snakemake.threads,
        force=True,
    )
