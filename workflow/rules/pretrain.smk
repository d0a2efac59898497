# Base models: trained here by flame or the built-in trainer, or taken from the hub or from disk.


rule pretrain:
    input:
        unpack(
            lambda w: with_provenance(
                tokens=paths.tokens(inputs.recipe(w.model).data, w.model),
                tokenizer=inputs.tokenizer(w.model),
                preflight=inputs.preflight(w.model),
            )
        ),
    output:
        model=directory(f"{results}/models/{{model}}"),
        provenance=f"{results}/models/{{model}}.provenance.json",
    log:
        f"{results}/logs/pretrain/{{model}}.log",
    benchmark:
        f"{results}/timings/pretrain/{{model}}.tsv"
    wildcard_constraints:
        model=any_of(inputs.trained()),
    priority: 3
    conda:
        "../../envs/pretrain.yaml"
    resources:
        gpu=lambda w: inputs.recipe(w.model).gpus,
        mem_mb=32000,
        runtime=1440,
        activation_checkpoint=lambda w: inputs.recipe(w.model).activation_checkpoint,
    params:
        code=code("pretrain"),
        settings=lambda w: inputs.pretraining_settings(w.model),
        checkpoints=paths.checkpoints,
    message:
        "training {wildcards.model}"
    script:
        "../../scripts/pretrain.py"


rule import_model:
    input:
        unpack(
            lambda w: with_provenance(
                tokenizer=inputs.tokenizer(w.model),
                local_model=inputs.local_model(w.model),
            )
        ),
    output:
        model=directory(f"{results}/models/{{model}}"),
        provenance=f"{results}/models/{{model}}.provenance.json",
    log:
        f"{results}/logs/import_model/{{model}}.log",
    benchmark:
        f"{results}/timings/import_model/{{model}}.tsv"
    wildcard_constraints:
        model=any_of(inputs.imported()),
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        code=code("import_model"),
        settings=lambda w: inputs.imported_settings(w.model),
        user_files=lambda w: inputs.user_digests(
            inputs.local_model(w.model), model_files
        ),
        commit=lambda w: inputs.commit("model", run_config.models[w.model].source),
    message:
        "taking in {wildcards.model}"
    script:
        "../../scripts/import_model.py"
