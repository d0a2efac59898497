from keycut.running.job import job

with job(snakemake) as run:
    from keycut.benchmarking import measure
    from keycut.config import Measurement

    cell = Measurement(**snakemake.params.cell)
    measure(run, cell, snakemake.output.result, device=run.device)
