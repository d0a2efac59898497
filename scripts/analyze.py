from reproduction.running.job import job

with job(snakemake) as run:
    import torch

    from reproduction.analysis.states import analyse_rank
    from statecut.data.packing import PackedTokens
    from statecut.models.checkpoint import Checkpoint, load

    model = Checkpoint(snakemake.input.model)
    text = PackedTokens(snakemake.input.tokens, slice_name=run.analysis.data.split("/")[1])
    analysis = analyse_rank(
        load(model.folder, device=run.device, dtype=model.compute_dtype(run.device)),
        torch.from_numpy(text[0][: snakemake.params.length]),
        model_digest=model.digest(),
        heads=[tuple(head) for head in snakemake.params.heads],
        skip=run.analysis.skip,
    )
    analysis.save(snakemake.output[0], force=True)
