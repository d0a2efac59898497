from pathlib import Path

from reproduction.running.job import job

with job(snakemake):
    from reproduction.reporting.verdict import verify

    verify(Path(snakemake.input[0]) / "cells.csv")
