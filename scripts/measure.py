from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.benchmarking.cell import measure
    from reproduction.config import Measurement

    cell = Measurement(**snakemake.params.cell)
    measure(run, cell, snakemake.output[0], device=run.device)
