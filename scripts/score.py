from reproduction.running.job import job

with job(snakemake) as run:
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.calibration import Calibration
    from statecut.pruning.select import select
    from statecut.pruning.selection import save_selections
    from statecut.pruning.statistics import ModelStatistics

    inputs, wildcards = snakemake.input, snakemake.wildcards
    method, model = run.methods[wildcards.method], Checkpoint(inputs.model)
    calibration = Calibration.load(inputs.calibration) if inputs.calibration else None
    values = wildcards.target == "v"
    channels = "value" if values else "key"
    _, width = model.shape.size(channels)
    selections = select(
        method.algorithm,
        ModelStatistics(model, calibration),
        range(1, width),
        channels=channels,
        target=None if values else wildcards.target,
        seed=int(wildcards.seed),
        **method.options,
    )
    save_selections(selections, snakemake.output[0])
