# Base models: trained here by flame or the built-in trainer, or taken from the hub or from disk.

TRAINED = [
    name for name, model in RUN.models.items() if model.source.kind == "pretrain"
]
ADOPTED = [name for name in RUN.models if name not in TRAINED]


def recipe_of(wildcards):
    return RUN.recipes[RUN.models[wildcards.model].source.recipe]


def spec_of(wildcards):
    return RUN.models[wildcards.model].model_dump(exclude={"label", "published_as"})


rule pretrain:
    input:
        tokens=lambda w: AT.tokens(recipe_of(w).data, w.model),
        tokenizer=lambda w: f"{OUT}/tokenizers/{RUN.models[w.model].tokenizer}",
        preflight=lambda w: AT.preflight(
            RUN.models[w.model].kernel, RUN.models[w.model].head_k_dim
        ),
    output:
        model=directory(f"{OUT}/models/{{model}}"),
        provenance=f"{OUT}/models/{{model}}.provenance.json",
    log:
        f"{OUT}/logs/pretrain/{{model}}.log",
    benchmark:
        f"{OUT}/timings/pretrain/{{model}}.tsv"
    wildcard_constraints:
        model=one_of(TRAINED),
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=lambda w: recipe_of(w).world_size,
        mem_mb=32000,
        runtime=1440,
    params:
        code=code("pretrain"),
        model=spec_of,
        recipe=lambda w: recipe_of(w).model_dump(),
        checkpoints=AT.checkpoints,
    message:
        "training {wildcards.model}"
    script:
        "../../scripts/pretrain.py"


rule adopt:
    input:
        tokenizer=lambda w: f"{OUT}/tokenizers/{RUN.models[w.model].tokenizer}",
    output:
        model=directory(f"{OUT}/models/{{model}}"),
        provenance=f"{OUT}/models/{{model}}.provenance.json",
    log:
        f"{OUT}/logs/adopt/{{model}}.log",
    benchmark:
        f"{OUT}/timings/adopt/{{model}}.tsv"
    wildcard_constraints:
        model=one_of(ADOPTED),
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        code=code("adopt"),
        model=spec_of,
    message:
        "taking in {wildcards.model}"
    script:
        "../../scripts/adopt.py"
