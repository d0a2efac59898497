from keycut.running.job import job

with job(snakemake) as run:
    from keycut.calibration import calibrate_folder
    from keycut.data.packing import PackedTokens

    calibration = calibrate_folder(
        snakemake.input.model,
        PackedTokens(snakemake.input.tokens, slice_name=run.calibration.data.split("/")[1]),
        name=run.calibration.data,
        sequences=run.calibration.sequences,
        rows=run.calibration.rows,
        seed=int(snakemake.wildcards.seed),
        device=run.device,
        gradients=bool(snakemake.wildcards.backward),
    )
    calibration.save(snakemake.output.folder, force=True)
