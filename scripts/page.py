from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.jobs import result_records
    from reproduction.reporting.report import write_report
    from reproduction.running.paths import Paths

    paths, variants = Paths(run), run.variants()
    write_report(
        run,
        frames=snakemake.input.frames,
        figures=snakemake.input.figures,
        curves={variant: paths.curve(variant) for variant in variants},
        steps={variant: paths.steps(variant) for variant in variants},
        records=result_records(Path(paths.root)).values(),
        out=snakemake.output[0],
    )
