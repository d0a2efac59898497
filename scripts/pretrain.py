from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    import torch

    from reproduction.pretraining.pretrain import pretrain_model
    from reproduction.pretraining.verdicts import padding
    from statecut.data.packing import PackedTokens
    from statecut.models.checkpoint import divide
    from statecut.record import Record
    from statecut.recovery.checkpoints import Output

    padding(snakemake.input.preflight, may_pad=False)
    name = snakemake.wildcards.model
    fitting = {"activation_checkpoint": snakemake.resources.activation_checkpoint}
    recipe = run.recipe_of(name).model_copy(update=fitting)
    run = run.model_copy(update={"recipes": {run.models[name].source.recipe: recipe}})
    length = PackedTokens(snakemake.input.tokens).manifest.sequence_length
    record = Record().then(
        training={
            "trained by": recipe.trainer,
            "tokens": f"{recipe.sequences * length:,} of {recipe.data}",
            "steps": recipe.steps,
            "learning rate": recipe.learning_rate,
            "seed": recipe.seed,
        },
        command=f"snakemake {snakemake.output[0]}",
    )
    output = Output(
        snakemake.output[0],
        checkpoints=snakemake.params.checkpoints,
        tokenizer=snakemake.input.tokenizer,
        files=lambda _: record.files(name, run.models[name].fla_config()),
        force=True,
        version=VERSION,
    )
    gpus = torch.cuda.device_count() if run.device == "cuda" else 0
    pretrain_model(run, name, snakemake.input.tokens, output, gpus=gpus)
    divide(output.folder)
