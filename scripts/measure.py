from pathlib import Path

from keycut.job import job

with job(snakemake) as config:
    from keycut.benchmarking import measure, preflight
    from keycut.layout import Layout

    out, checked = snakemake.output.result, snakemake.input.preflight
    (cell,) = [c for c in config.measurements() if Layout(config).measurement(c) == out]
    measure(config, cell, Path(out), verdict=preflight.read(checked) if checked else None)
