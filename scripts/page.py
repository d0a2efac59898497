from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.reporting.jobs import result_records
    from reproduction.reporting.report import write_report
    from reproduction.running.code import ROOT

    results, variants = Path(snakemake.output[0]).parent, run.variants()
    curves = {v: Path(p) for v, p in zip(variants, snakemake.params.curves, strict=True)}
    steps = {v: map(Path, p) for v, p in zip(variants, snakemake.params.steps, strict=True)}
    write_report(
        run,
        frames=snakemake.input.frames,
        verdict=snakemake.input.verdict,
        figures=snakemake.input.figures,
        curves={variant: path for variant, path in curves.items() if path.is_file()},
        timings={
            rule.name: sorted(rule.rglob("*.tsv"))
            for rule in sorted((results / "timings").iterdir())
        },
        steps={v: [path for path in paths if path.is_file()] for v, paths in steps.items()},
        records=result_records(results).values(),
        out=snakemake.output[0],
        templates=ROOT / "workflow/templates",
    )
