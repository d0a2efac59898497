# Which channels stay: one selection per model, method, target, ratio and seed.


rule score:
    input:
        unpack(
            lambda w: with_provenance(
                model=paths.base_model(w.model),
                calibration=inputs.calibration(w.model, w.method, w.seed),
            )
        ),
    output:
        selection=f"{results}/selections/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}.safetensors",
        provenance=f"{results}/selections/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}.safetensors.provenance.json",
    log:
        f"{results}/logs/score/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}.log",
    benchmark:
        f"{results}/timings/score/{{model}}-{{method}}-{{target}}-{{ratio}}-{{seed}}.tsv"
    priority: 2
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=16000,
        runtime=30,
    params:
        code=lambda w: known_code(
            "score", METHODS[run_config.methods[w.method].algorithm].module
        ),
        settings=lambda w: inputs.method_settings(w.method),
        kept=lambda w: inputs.kept(w.model, w.ratio),
    message:
        "choosing channels of {wildcards.model}: {wildcards.method}, {wildcards.target}, {wildcards.ratio}, seed {wildcards.seed}"
    script:
        "../../scripts/score.py"
