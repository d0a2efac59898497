from pathlib import Path

from keycut.job import job

with job(snakemake) as config:
    from keycut.evaluation import evaluate

    evaluate(
        snakemake.input.model,
        snakemake.wildcards.suite,
        config,
        snakemake.output.result,
        cache=Path(snakemake.params.checkpoints) / "evaluation",
        device=config.device,
    )
