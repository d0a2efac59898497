from dataclasses import asdict

from reproduction.running.job import job

with job(snakemake) as run:
    from statecut.files import write_json
    from statecut.models.shapes import Shape
    from statecut.preflight import check_shapes

    shape = Shape(**snakemake.params.shape)
    (verdict,) = check_shapes([shape], **run.preflight.model_dump(), device=run.device)
    write_json(snakemake.output.verdict, asdict(verdict))
