# Which shapes the kernels of this machine can train, before any GPU time is spent on them.


rule preflight_shape:
    output:
        verdict=f"{results}/preflight/{{shape}}.json",
        provenance=f"{results}/preflight/{{shape}}.json.provenance.json",
    log:
        f"{results}/logs/preflight/{{shape}}.log",
    benchmark:
        f"{results}/timings/preflight_shape/{{shape}}.tsv"
    priority: 3
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=16000,
        runtime=60,
    params:
        code=code("preflight_shape"),
        settings=lambda w: inputs.section_settings("preflight"),
        shape=lambda w: asdict(inputs.shapes[w.shape]),
    message:
        "checking {wildcards.shape}"
    script:
        "../../scripts/preflight_shape.py"


rule preflight:
    input:
        [paths.preflight(shape) for shape in run_config.trained_shapes()],
