from pathlib import Path

from keycut.running.job import job

with job(snakemake) as run:
    from keycut.benchmarking.preflight import check_shape
    from keycut.config import Shape

    shape = Shape(**snakemake.params.shape)
    check_shape(shape, run.preflight, Path(snakemake.output.verdict), device=run.device)
