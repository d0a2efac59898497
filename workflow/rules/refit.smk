# Sliced models with their output projections fitted again, on the text of their calibration.


rule refit:
    input:
        unpack(
            lambda w: with_provenance(
                student=f"{results}/sliced/{w.model}/{w.method}-{w.target}-{w.ratio}-{w.seed}{w.eps}",
                teacher=paths.base_model(w.model),
                tokens=paths.tokens(run_config.calibration.data, w.model),
            )
        ),
    output:
        model=directory(
            f"{results}/refitted/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}"
        ),
        provenance=f"{results}/refitted/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}.provenance.json",
    log:
        f"{results}/logs/refit/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}.log",
    benchmark:
        f"{results}/timings/refit/{{model}}-{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}.tsv"
    priority: 1
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=lambda w: known_code("refit", inputs.adapter(f"models/{w.model}")),
        settings=lambda w: inputs.section_settings("calibration"),
    message:
        "refitting {wildcards.model}: {wildcards.method}, {wildcards.target}, {wildcards.ratio}, seed {wildcards.seed}{wildcards.eps}"
    script:
        "../../scripts/refit.py"
