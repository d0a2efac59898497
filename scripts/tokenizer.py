from contextlib import redirect_stderr
from pathlib import Path

from keycut.config import parse_config
from keycut.data.corpora import make_tokenizer
from keycut.hub import DOWNLOADS, LOCK

with open(snakemake.log[0], "w", buffering=1) as log, redirect_stderr(log):
    make_tokenizer(
        parse_config(snakemake.config, "the configuration"),
        snakemake.wildcards.tokenizer,
        Path(snakemake.output[0]),
        downloads=DOWNLOADS,
        lock=LOCK,
        force=True,
    )
