from reproduction.running.job import job

with job(snakemake):
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.selection import load_selection
    from statecut.pruning.slicing import slice_model
    from statecut.record import Record

    out, name = snakemake.output[0], snakemake.wildcards.model
    eps = "matched" if snakemake.wildcards.eps else "kept"
    model, (keys, values) = Checkpoint(snakemake.input.model), snakemake.params.widths
    selection, *of_values = (
        load_selection(path, keys=keys, values=values) for path in snakemake.input.selections
    )
    if of_values:
        selection = selection.with_values(*of_values)
    selection.check_model(model)
    record = Record.read(model.folder).then(
        base={"name": name, "digest": model.digest()},
        cut=selection.entry(model, eps),
        command=f"snakemake {out}",
    )
    slice_model(
        model,
        **selection.changes(),
        out=out,
        dtype=None,
        eps=eps,
        files=record.files(f"{name}-{snakemake.wildcards.method}", model.config),
        force=True,
        links=True,
    )
