# Which widths the kernels of this machine can train, before any GPU time is spent on them.


rule preflight_width:
    output:
        verdict=f"{OUT}/preflight/{{kernel}}-{{width}}.json",
        provenance=f"{OUT}/preflight/{{kernel}}-{{width}}.json.provenance.json",
    log:
        f"{OUT}/logs/preflight/{{kernel}}-{{width}}.log",
    benchmark:
        f"{OUT}/timings/preflight_width/{{kernel}}-{{width}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=16000,
        runtime=60,
    params:
        code=code("preflight_width"),
        settings=RUN.preflight.model_dump(),
    message:
        "checking {wildcards.kernel} at width {wildcards.width}"
    script:
        "../../scripts/preflight_width.py"


rule preflight:
    input:
        [AT.preflight(kernel, width) for kernel, width in RUN.trained_widths()],
