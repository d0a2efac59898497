from keycut.running.job import job

with job(snakemake) as run:
    from keycut.calibration import Calibration
    from keycut.models.checkpoint import Checkpoint
    from keycut.selection.evidence import Evidence
    from keycut.selection.select import select

    given, wildcards = snakemake.input, snakemake.wildcards
    method = run.methods[wildcards.method]
    evidence = Evidence(
        Checkpoint(given.model),
        Calibration.load(given.calibration) if given.calibration else None,
        target=wildcards.target,
        seed=int(wildcards.seed),
    )
    (selection,) = select(method.algorithm, evidence, [snakemake.params.kept], **method.options)
    selection.save(snakemake.output.selection)
