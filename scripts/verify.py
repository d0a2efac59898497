from pathlib import Path

from keycut.running.job import job

with job(snakemake):
    from keycut.reporting.verdict import verify

    verify(Path(snakemake.input.verdict) / "cells.csv")
