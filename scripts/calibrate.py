from keycut.job import job

with job(snakemake) as config:
    from keycut.calibration import calibrate_folder
    from keycut.data.packing import PackedTokens

    found = calibrate_folder(
        snakemake.input.model,
        PackedTokens(snakemake.input.tokens, slice_name=config.calibration.data.split("/")[1]),
        config.calibration,
        seed=int(snakemake.wildcards.seed),
        device=config.device,
    )
    found.save(snakemake.output.folder, force=True)
