from pathlib import Path

from keycut.job import job

with job(snakemake) as config:
    from keycut.benchmarking import measure
    from keycut.layout import Layout

    out = snakemake.output.result
    (cell,) = [c for c in config.measurements() if Layout(config).measurement(c) == out]
    measure(config, cell, Path(out), device=config.device)
