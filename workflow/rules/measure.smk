# What is measured of models: one JSON each for a suite and for a timed cell, and states along one
# sequence for figures.


rule evaluate:
    input:
        model=f"{results}/{{subject}}",
        files=lambda w: inputs.task_files(w.suite),
    output:
        f"{results}/evaluations/{{subject}}/{{suite}}.json",
    log:
        f"{results}/logs/evaluate/{{subject}}/{{suite}}.log",
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=24000,
        runtime=120,
    params:
        code=code("scripts/evaluate.py"),
        settings=lambda w: inputs.suite_settings(w.suite),
        data=lambda w: inputs.task_data(w.suite),
        checkpoints=paths.checkpoints,
    message:
        "evaluating {wildcards.subject} on {wildcards.suite}"
    script:
        "../../scripts/evaluate.py"


# Throughput and memory: one cell of a benchmark per job, alone on its GPU.
rule measure:
    output:
        f"{results}/measurements/{{benchmark}}/{{measured}}.json",
    log:
        f"{results}/logs/measure/{{benchmark}}/{{measured}}.log",
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=24000,
        runtime=60,
    params:
        code=lambda w: code(
            "scripts/measure.py",
            "src/reproduction/benchmarking",
            "src/reproduction/generation.py",
            inputs.cell_adapter(w.benchmark, w.measured),
        ),
        settings=lambda w: inputs.cell_settings(w.benchmark, w.measured),
        cell=lambda w: asdict(inputs.cell(w.benchmark, w.measured)),
        shape=lambda w: inputs.cell_shape(w.benchmark, w.measured),
    message:
        "measuring {wildcards.benchmark}: {wildcards.measured}"
    script:
        "../../scripts/measure.py"


rule analyze:
    input:
        model=f"{results}/{{subject}}",
        tokens=lambda w: paths.tokens(run_config.analysis.data, w.subject.split("/")[1]),
    output:
        f"{results}/analyses/{{subject}}.npz",
    log:
        f"{results}/logs/analyze/{{subject}}.log",
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=24000,
        runtime=60,
    params:
        code=code("scripts/analyze.py", "src/reproduction/analysis"),
        settings=inputs.settings("device", "analysis"),
        heads=lambda w: inputs.heads(w.subject),
        length=lambda w: inputs.length(w.subject),
    message:
        "analysing the states of {wildcards.subject}"
    script:
        "../../scripts/analyze.py"
