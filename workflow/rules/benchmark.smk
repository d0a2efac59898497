# Throughput and memory: one cell of a benchmark per job, alone on its GPU.


rule measure:
    output:
        result=f"{OUT}/measurements/{{benchmark}}/{{measured}}.json",
        provenance=f"{OUT}/measurements/{{benchmark}}/{{measured}}.json.provenance.json",
    log:
        f"{OUT}/logs/measure/{{benchmark}}/{{measured}}.log",
    benchmark:
        f"{OUT}/timings/measure/{{benchmark}}-{{measured}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code("measure"),
        uses=lambda w: READS.uses_cell(w.benchmark, w.measured),
        cell=lambda w: asdict(READS.cell(w.benchmark, w.measured)),
        shape=lambda w: READS.shape_of_cell(w.benchmark, w.measured),
    message:
        "measuring {wildcards.benchmark}: {wildcards.measured}"
    script:
        "../../scripts/measure.py"
