from pathlib import Path

from keycut.running.job import job

with job(snakemake):
    from keycut.reporting.steps import verify_files

    verify_files(Path(snakemake.input.verdict) / "cells.csv")
