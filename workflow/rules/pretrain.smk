# Base models: trained here by flame or the built-in trainer, or taken from the hub or from disk.


rule pretrain:
    input:
        unpack(
            lambda w: made(
                tokens=AT.tokens(READS.recipe(w.model).data, w.model),
                tokenizer=READS.tokenizer(w.model),
                preflight=READS.preflight(w.model),
            )
        ),
    output:
        model=directory(f"{OUT}/models/{{model}}"),
        provenance=f"{OUT}/models/{{model}}.provenance.json",
    log:
        f"{OUT}/logs/pretrain/{{model}}.log",
    benchmark:
        f"{OUT}/timings/pretrain/{{model}}.tsv"
    wildcard_constraints:
        model=one_of(READS.trained()),
    conda:
        "../../envs/pretrain.yaml"
    resources:
        gpu=lambda w: READS.recipe(w.model).gpus,
        mem_mb=32000,
        runtime=1440,
        activation_checkpoint=lambda w: READS.recipe(w.model).activation_checkpoint,
    params:
        code=code("pretrain"),
        uses=lambda w: READS.uses_pretraining(w.model),
        checkpoints=AT.checkpoints,
    message:
        "training {wildcards.model}"
    script:
        "../../scripts/pretrain.py"


rule adopt:
    input:
        unpack(
            lambda w: made(
                tokenizer=READS.tokenizer(w.model), given=READS.given_model(w.model)
            )
        ),
    output:
        model=directory(f"{OUT}/models/{{model}}"),
        provenance=f"{OUT}/models/{{model}}.provenance.json",
    log:
        f"{OUT}/logs/adopt/{{model}}.log",
    benchmark:
        f"{OUT}/timings/adopt/{{model}}.tsv"
    wildcard_constraints:
        model=one_of(READS.adopted()),
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        code=code("adopt"),
        uses=lambda w: READS.uses_adopted(w.model),
        given=lambda w: READS.digests(READS.given_model(w.model), model_files),
        commit=lambda w: READS.commit("model", RUN.models[w.model].source),
    message:
        "taking in {wildcards.model}"
    script:
        "../../scripts/adopt.py"
