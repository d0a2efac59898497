from keycut.job import job

with job(snakemake) as config:
    import torch

    from keycut.benchmarking.preflight import padding
    from keycut.card import card, pretrained_facts
    from keycut.data.packing import PackedTokens
    from keycut.training.trainers import pretrain_model, recipe_of

    padding(snakemake.input.preflight, may_pad=False)
    name = snakemake.wildcards.model
    recipe = recipe_of(config, name)
    length = PackedTokens(snakemake.input.tokens).manifest.sequence_length
    pretrain_model(
        config,
        name,
        snakemake.input.tokens,
        snakemake.output.model,
        checkpoints=snakemake.params.checkpoints,
        tokenizer=snakemake.input.tokenizer,
        gpus=torch.cuda.device_count() if config.device == "cuda" else 0,
        card=card(
            name,
            f"{config.models[name].label}, trained from scratch by Keycut.",
            pretrained_facts(recipe, length),
            command=f"snakemake {snakemake.output.model}",
            config=config.models[name].fla_config(),
        ),
        force=True,
    )
