from reproduction.running.job import job

with job(snakemake) as run:
    from statecut.data.packing import PackedTokens
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.calibration import sampled_sequences
    from statecut.pruning.refit import refit, write_refitted
    from statecut.record import Record

    out, wildcards = snakemake.output[0], snakemake.wildcards
    student, teacher = Checkpoint(snakemake.input.student), Checkpoint(snakemake.input.teacher)
    data = PackedTokens(snakemake.input.tokens, slice_name=run.calibration.data.split("/")[1])
    ids = sampled_sequences(data, run.calibration.sequences, int(wildcards.seed))
    result = refit(student, teacher, ids, device=run.device)
    record = Record.read(student.folder).then(
        base={"name": wildcards.model, "digest": student.digest()},
        refit=result.entry() | {"teacher": teacher.digest()},
        command=f"snakemake {out}",
    )
    name = f"{wildcards.model}-{wildcards.method}-refitted"
    files = record.files(name, student.config)
    write_refitted(student, result, out, files=files, force=True, links=True)
