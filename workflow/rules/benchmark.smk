# Throughput and memory: one cell of a benchmark per job, alone on its GPU.


rule measure:
    output:
        result=f"{results}/measurements/{{benchmark}}/{{measured}}.json",
        provenance=f"{results}/measurements/{{benchmark}}/{{measured}}.json.provenance.json",
    log:
        f"{results}/logs/measure/{{benchmark}}/{{measured}}.log",
    benchmark:
        f"{results}/timings/measure/{{benchmark}}-{{measured}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=lambda w: known_code(
            "measure", inputs.cell_adapter(w.benchmark, w.measured)
        ),
        settings=lambda w: inputs.cell_settings(w.benchmark, w.measured),
        cell=lambda w: asdict(inputs.cell(w.benchmark, w.measured)),
        shape=lambda w: inputs.cell_shape(w.benchmark, w.measured),
    message:
        "measuring {wildcards.benchmark}: {wildcards.measured}"
    script:
        "../../scripts/measure.py"
