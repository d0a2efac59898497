from pathlib import Path

from reproduction.running.job import job

with job(snakemake) as run:
    from reproduction.suites.suite import evaluate

    evaluate(
        snakemake.input.model,
        snakemake.wildcards.suite,
        run,
        snakemake.output.result,
        # The code counts: what other code has finished is not taken up.
        cache=Path(snakemake.params.checkpoints) / "evaluation" / snakemake.params.code["digest"],
        device=run.device,
    )
