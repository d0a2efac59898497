from reproduction.running.job import job

with job(snakemake) as run:
    from statecut.card import card
    from statecut.data.packing import PackedTokens
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.calibration import sampled_sequences
    from statecut.pruning.outcome import refitted_facts
    from statecut.pruning.refit import refit, write_refitted

    out, wildcards = snakemake.output.model, snakemake.wildcards
    student, teacher = Checkpoint(snakemake.input.student), Checkpoint(snakemake.input.teacher)
    data = PackedTokens(snakemake.input.tokens, slice_name=run.calibration.data.split("/")[1])
    ids = sampled_sequences(data, run.calibration.sequences, int(wildcards.seed))
    result = refit(student, teacher, ids, device=run.device)
    text = card(
        f"{wildcards.model}-{wildcards.method}-refitted",
        f"{wildcards.model} with fewer key and query channels, pruned and refitted by Statecut.",
        {
            **{name: wildcards[name] for name in ("method", "target", "ratio")},
            "sliced model digest": student.digest(),
            **refitted_facts(result, teacher),
        },
        command=f"snakemake {out}",
        config=student.config,
        base=wildcards.model,
    )
    write_refitted(student, result, out, card=text, force=True)
