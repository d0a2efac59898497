from reproduction.running.job import job

# Raise it when a change alters results: they are made again, and all that hangs on them.
VERSION = 1

with job(snakemake) as run:
    from contextlib import suppress

    import torch

    from reproduction.pretraining.pretrain import pretrain_model
    from reproduction.pretraining.verdicts import padding
    from statecut.data.packing import PackedTokens
    from statecut.models.checkpoint import divide
    from statecut.record import Record
    from statecut.recovery.checkpoints import Finished, Output

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

    def files(folder):
        divide(folder)  # before it gets its name, when other jobs read it
        return record.files(name, run.models[name].fla_config())

    output = Output(
        snakemake.output[0],
        checkpoints=snakemake.params.checkpoints,
        tokenizer=snakemake.input.tokenizer,
        files=files,
        force=True,
        version=VERSION,
        wait=True,
    )
    gpus = torch.cuda.device_count() if run.device == "cuda" else 0
    with suppress(Finished):  # by a job that Slurm or Snakemake had lost sight of
        pretrain_model(run, name, snakemake.input.tokens, output, gpus=gpus)
