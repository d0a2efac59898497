from pathlib import Path

from keycut.running.job import job

with job(snakemake) as run:
    from keycut.evaluation import evaluate

    evaluate(
        snakemake.input.model,
        snakemake.wildcards.suite,
        run,
        snakemake.output.result,
        cache=Path(snakemake.params.checkpoints) / "evaluation",
        device=run.device,
    )
