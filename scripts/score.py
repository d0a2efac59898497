from reproduction.running.job import job

with job(snakemake) as run:
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.calibration import Calibration
    from statecut.pruning.select import select
    from statecut.pruning.statistics import ModelStatistics

    inputs, wildcards = snakemake.input, snakemake.wildcards
    method = run.methods[wildcards.method]
    calibration = Calibration.load(inputs.calibration) if inputs.calibration else None
    (selection,) = select(
        method.algorithm,
        ModelStatistics(Checkpoint(inputs.model), calibration),
        [snakemake.params.kept],
        target=wildcards.target,
        seed=int(wildcards.seed),
        **method.options,
    )
    selection.save(snakemake.output.selection)
