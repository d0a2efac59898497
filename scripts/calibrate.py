from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    from statecut.data.packing import PackedTokens
    from statecut.pruning.calibration import calibrate_folder

    calibration = calibrate_folder(
        snakemake.input.model,
        PackedTokens(snakemake.input.tokens, slice_name=run.calibration.data.split("/")[1]),
        name=run.calibration.data,
        sequences=run.calibration.sequences,
        rows=run.calibration.rows,
        seed=int(snakemake.wildcards.seed),
        device=run.device,
        gradients=bool(snakemake.wildcards.backward),
        values=bool(snakemake.wildcards.values),
    )
    calibration.save(snakemake.output[0], force=True)
