# Which channels stay: one selection per model, method, target, ratio and seed.


rule score:
    input:
        unpack(
            lambda w: made(
                model=AT.base_model(w.model),
                calibration=READS.calibration(w.model, w.method, w.seed),
            )
        ),
    output:
        selection=f"{OUT}/selections/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}.safetensors",
        provenance=f"{OUT}/selections/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}.safetensors.provenance.json",
    log:
        f"{OUT}/logs/score/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}.log",
    benchmark:
        f"{OUT}/timings/score/{{model}}-{{method}}-{{target}}-{{ratio}}-{{seed}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=16000,
        runtime=30,
    params:
        code=lambda w: code_now(
            "score", METHODS[RUN.methods[w.method].algorithm].module
        ),
        uses=lambda w: READS.uses_method(w.method),
        kept=lambda w: READS.kept(w.model, w.ratio),
    message:
        "choosing channels of {wildcards.model}: {wildcards.method}, {wildcards.target}, {wildcards.ratio}, seed {wildcards.seed}"
    script:
        "../../scripts/score.py"
