from dataclasses import asdict

from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    from statecut.files import write_json
    from statecut.models.shapes import Shape
    from statecut.preflight import check_shapes

    shape = Shape(**snakemake.params.shape)
    (verdict,) = check_shapes([shape], **run.preflight.model_dump(), device=run.device)
    write_json(snakemake.output[0], asdict(verdict))
