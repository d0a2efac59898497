from reproduction.running.job import job

with job(snakemake):
    from statecut.card import card
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.outcome import pruned_facts
    from statecut.pruning.selection import Selection
    from statecut.pruning.slicing import slice_model

    out, name = snakemake.output.model, snakemake.wildcards.model
    eps = "matched" if snakemake.wildcards.eps else "kept"
    model, selection = Checkpoint(snakemake.input.model), Selection.load(snakemake.input.selection)
    selection.check_model(model)
    slice_model(
        model,
        selection.change(),
        out,
        dtype=None,
        eps=eps,
        card=card(
            f"{name}-{snakemake.wildcards.method}",
            f"{name} with fewer key and query channels, pruned by Statecut.",
            pruned_facts(selection, float(snakemake.wildcards.ratio), model, eps),
            command=f"snakemake {out}",
            config=model.config,
            base=name,
        ),
        force=True,
    )
