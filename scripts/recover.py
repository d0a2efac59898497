from reproduction.running.job import job

with job(snakemake) as run:
    from statecut.card import card
    from statecut.data.packing import PackedTokens
    from statecut.models.checkpoint import Checkpoint
    from statecut.preflight.preflight import padding
    from statecut.recovery.facts import recovered_facts
    from statecut.recovery.output import Output
    from statecut.recovery.recovery import recover

    out, name, cut = snakemake.output.model, snakemake.wildcards.model, snakemake.wildcards.cut
    student, teacher = Checkpoint(snakemake.input.student), Checkpoint(snakemake.input.teacher)
    data = PackedTokens(snakemake.input.tokens, slice_name=run.recovery.data.split("/")[1])
    settings = run.recovery.model_copy(update={"parts": snakemake.resources.parts})
    output = Output(
        out,
        checkpoints=snakemake.params.checkpoints,
        card=card(
            f"{name}-{cut}",
            f"{name} after the cut {cut}, recovered by Statecut.",
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
