from keycut.running.job import job

with job(snakemake) as run:
    from keycut.benchmarking.preflight import padding
    from keycut.data.packing import PackedTokens
    from keycut.models.card import card, recovered_facts
    from keycut.models.checkpoint import Checkpoint
    from keycut.training.output import Output
    from keycut.training.recovery import recover

    out, name, cut = snakemake.output.model, snakemake.wildcards.model, snakemake.wildcards.cut
    student, teacher = Checkpoint(snakemake.input.student), Checkpoint(snakemake.input.teacher)
    data = PackedTokens(snakemake.input.tokens, slice_name=run.recovery.data.split("/")[1])
    settings = run.recovery.model_copy(update={"parts": snakemake.resources.parts})
    output = Output(
        out,
        checkpoints=snakemake.params.checkpoints,
        card=card(
            f"{name}-{cut}",
            f"{name} after the cut {cut}, recovered by Keycut.",
            recovered_facts(settings, data.manifest.sequence_length, student, teacher),
            command=f"snakemake {out}",
            config=student.config,
            base=name,
        ),
        force=True,
        version=snakemake.params.code["version"],
    )
    recover(
        student.folder,
        teacher.folder,
        data,
        settings,
        output,
        device=run.device,
        padded_to=padding(snakemake.input.preflight),
    )
