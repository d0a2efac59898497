# Throughput and memory: one cell of a benchmark per job, alone on its GPU.

CELLS = {AT.measurement(cell): cell for cell in RUN.measurements()}


def cell_of(wildcards):
    return CELLS[f"{OUT}/measurements/{wildcards.benchmark}/{wildcards.measured}.json"]


def preflight_of_cell(wildcards):
    cell = cell_of(wildcards)
    return AT.preflight(cell.kernel, cell.width) if cell.trains else []


def shape_of_cell(wildcards):
    # Of a whole model: its shape is part of what is timed.
    subject = cell_of(wildcards).subject
    return RUN.models[subject].fla_config() if subject in RUN.models else None


rule measure:
    input:
        preflight=preflight_of_cell,
    output:
        result=f"{OUT}/measurements/{{benchmark}}/{{measured}}.json",
        provenance=f"{OUT}/measurements/{{benchmark}}/{{measured}}.json.provenance.json",
    log:
        f"{OUT}/logs/measure/{{benchmark}}/{{measured}}.log",
    benchmark:
        f"{OUT}/timings/measure/{{benchmark}}-{{measured}}.tsv"
    wildcard_constraints:
        measured=one_of({Path(cell).stem for cell in CELLS}),
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code("measure"),
        settings=lambda w: RUN.benchmarks[w.benchmark].model_dump(),
        shape=shape_of_cell,
    message:
        "measuring {wildcards.benchmark}: {wildcards.measured}"
    script:
        "../../scripts/measure.py"
