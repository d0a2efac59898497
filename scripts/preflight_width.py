from pathlib import Path

from keycut.job import job

with job(snakemake) as config:
    from keycut.benchmarking.preflight import check_width

    check_width(
        snakemake.wildcards.kernel,
        int(snakemake.wildcards.width),
        config.preflight,
        Path(snakemake.output.verdict),
    )
