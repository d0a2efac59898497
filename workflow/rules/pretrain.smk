# Base models: trained here by flame or the built-in trainer, or taken from the hub or from disk; and
# which shapes the kernels of this machine can train, before any GPU time is spent on them.


rule preflight_shape:
    output:
        f"{results}/preflight/{{shape}}.json",
    log:
        f"{results}/logs/preflight/{{shape}}.log",
    priority: 3
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=8000,
        runtime=60,
    params:
        code=code("scripts/preflight_shape.py"),
        settings=inputs.section_settings("preflight"),
        shape=lambda w: asdict(inputs.shapes[w.shape]),
    message:
        "checking {wildcards.shape}"
    script:
        "../../scripts/preflight_shape.py"


rule preflight:
    input:
        [paths.preflight(shape) for shape in run_config.trained_shapes()],


rule pretrain:
    input:
        tokens=lambda w: paths.tokens(run_config.recipe_of(w.model).data, w.model),
        tokenizer=lambda w: inputs.tokenizer(w.model),
        preflight=lambda w: inputs.preflight(w.model),
    output:
        directory(f"{results}/models/{{model}}"),
    log:
        f"{results}/logs/pretrain/{{model}}.log",
    wildcard_constraints:
        model=any_of(inputs.trained),
    priority: 3
    conda:
        "../../envs/pretrain.yaml"
    resources:
        gpu=lambda w: run_config.recipe_of(w.model).gpus,
        mem_mb=32000,
        runtime=1440,
        activation_checkpoint=lambda w: run_config.recipe_of(
            w.model
        ).activation_checkpoint,
    params:
        code=code("scripts/pretrain.py"),
        settings=lambda w: inputs.pretraining_settings(w.model),
        checkpoints=paths.checkpoints,
    message:
        "training {wildcards.model}"
    script:
        "../../scripts/pretrain.py"


rule import_model:
    input:
        tokenizer=lambda w: inputs.tokenizer(w.model),
        local_model=lambda w: inputs.local_model(w.model),
    output:
        directory(f"{results}/models/{{model}}"),
    log:
        f"{results}/logs/import_model/{{model}}.log",
    wildcard_constraints:
        model=any_of(inputs.imported),
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=lambda w: inputs.import_mb(w.model),
        runtime=30,
    params:
        code=code("scripts/import_model.py"),
        settings=lambda w: inputs.imported_settings(w.model),
        commit=lambda w: inputs.commit("model", run_config.models[w.model].source),
    message:
        "taking in {wildcards.model}"
    script:
        "../../scripts/import_model.py"
