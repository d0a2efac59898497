from keycut.job import job

with job(snakemake) as config:
    import torch

    from keycut.card import card, pretrained_facts
    from keycut.data.packing import PackedTokens
    from keycut.models.checkpoint import create
    from keycut.training.pretrain import pretrain

    name = snakemake.wildcards.model
    spec = config.models[name]
    recipe = config.recipes[spec.source.recipe]
    data = PackedTokens(snakemake.input.tokens, slice_name=recipe.data.split("/")[1])
    model = create(spec.fla_config(), seed=recipe.seed)
    pretrain(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        data,
        recipe,
        snakemake.output.model,
        checkpoints=snakemake.params.checkpoints,
        tokenizer=snakemake.input.tokenizer,
        card=card(
            name,
            f"{spec.label}, trained from scratch by Keycut.",
            pretrained_facts(recipe, data.manifest.sequence_length),
            command=f"snakemake {snakemake.output.model}",
            config=spec.fla_config(),
        ),
        force=True,
    )
