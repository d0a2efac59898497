from pathlib import Path

from keycut.job import job

with job(snakemake) as config:
    from keycut.benchmarking.preflight import check_shape
    from keycut.inputs import Inputs

    shape = Inputs(config).shapes[snakemake.wildcards.shape]
    check_shape(shape, config.preflight, Path(snakemake.output.verdict), device=config.device)
