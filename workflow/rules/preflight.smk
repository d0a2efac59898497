# Which shapes the kernels of this machine can train, before any GPU time is spent on them.


rule preflight_shape:
    output:
        verdict=f"{OUT}/preflight/{{shape}}.json",
        provenance=f"{OUT}/preflight/{{shape}}.json.provenance.json",
    log:
        f"{OUT}/logs/preflight/{{shape}}.log",
    benchmark:
        f"{OUT}/timings/preflight_shape/{{shape}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=16000,
        runtime=60,
    params:
        code=code("preflight_shape"),
        uses=lambda w: READS.uses_changed("preflight"),
        shape=lambda w: asdict(READS.shapes[w.shape]),
    message:
        "checking {wildcards.shape}"
    script:
        "../../scripts/preflight_shape.py"


rule preflight:
    input:
        [AT.preflight(shape) for shape in RUN.trained_shapes()],
