from pathlib import Path

from keycut.job import commit, job

with job(snakemake) as config:
    from keycut.inputs import Inputs
    from keycut.layout import BESIDE, Layout
    from keycut.reporting.report import write_report

    at = Layout(config)
    timings = Path(at.root) / "timings"
    meanwhile = ("document", "pdf")  # typeset beside this job: what is told of them comes and goes
    write_report(
        Inputs(config).shown(),
        frames=snakemake.input.frames,
        verdict=snakemake.input.verdict,
        figures=snakemake.input.figures,
        curves=at.curves(),
        jobs={
            rule.name: sorted(rule.rglob("*.tsv"))
            for rule in sorted(timings.iterdir())
            if rule.name not in meanwhile
        },
        made=at.made(),
        records=sorted(
            path for path in Path(at.root).rglob(f"*{BESIDE}") if not path.match("document.*")
        ),
        out=snakemake.output.html,
        templates=snakemake.params.templates,
        commit=commit() or "",
    )
