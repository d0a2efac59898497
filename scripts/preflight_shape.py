from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from statecut.models.shapes import Shape
    from statecut.preflight.preflight import check_shape

    shape = Shape(**snakemake.params.shape)
    check_shape(shape, run.preflight, Path(snakemake.output.verdict), device=run.device)
