from keycut.job import job

with job(snakemake) as run:
    from keycut.calibration import Calibration
    from keycut.models.checkpoint import Checkpoint
    from keycut.selection.evidence import Evidence
    from keycut.selection.methods import select

    wildcards = snakemake.wildcards
    given, model = snakemake.input.calibration, Checkpoint(snakemake.input.model)
    method = run.methods[wildcards.method]
    evidence = Evidence(
        model,
        Calibration.load(given) if given else None,
        target=wildcards.target,
        seed=int(wildcards.seed),
        **method.model_dump(exclude={"algorithm", "label", "target"}),
    )
    (selection,) = select(method.algorithm, evidence, [snakemake.params.kept])
    selection.save(snakemake.output.selection)
