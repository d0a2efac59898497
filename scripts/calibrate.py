from keycut.job import job

with job(snakemake) as config:
    import torch

    from keycut.calibration import calibrate_folder
    from keycut.data.packing import PackedTokens

    found = calibrate_folder(
        snakemake.input.model,
        PackedTokens(snakemake.input.tokens, slice_name=config.calibration.data.split("/")[1]),
        config.calibration,
        seed=int(snakemake.wildcards.seed),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    found.save(snakemake.output.folder, force=True)
