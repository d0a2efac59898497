from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    from contextlib import suppress

    from reproduction.pretraining.verdicts import padding
    from statecut.data.packing import PackedTokens
    from statecut.models.checkpoint import Checkpoint
    from statecut.record import Record
    from statecut.recovery.checkpoints import Finished, Output
    from statecut.recovery.training import recover, recovered_facts

    out, name, cut = snakemake.output[0], snakemake.wildcards.model, snakemake.wildcards.cut
    student, teacher = Checkpoint(snakemake.input.student), Checkpoint(snakemake.input.teacher)
    data = PackedTokens(snakemake.input.tokens, slice_name=run.recovery.data.split("/")[1])
    fitting = {"gradient_accumulation_steps": snakemake.resources.gradient_accumulation_steps}
    settings = run.recovery.model_copy(update=fitting).settings()
    record = Record.read(student.folder).then(
        base={"name": name, "digest": student.digest()},
        recovery=recovered_facts(settings, data.manifest.sequence_length, student, teacher),
        command=f"snakemake {out}",
    )
    output = Output(
        out,
        checkpoints=snakemake.params.checkpoints,
        files=lambda _: record.files(f"{name}-{cut}", student.config),
        force=True,
        links=True,
        version=VERSION,
        wait=True,
    )
    with suppress(Finished):  # by a job that Slurm or Snakemake had lost sight of
        recover(
            student.folder,
            teacher.folder,
            data,
            settings,
            output,
            device=run.device,
            padded_to=padding(snakemake.input.preflight),
        )
