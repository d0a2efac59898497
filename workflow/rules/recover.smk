# Recovery of every pruned model that a table shows recovered, and of the unpruned one as control.


def student_of(wildcards):
    if wildcards.cut == BASELINE:
        return f"{OUT}/models/{wildcards.model}"
    return f"{OUT}/sliced/{wildcards.model}/{wildcards.cut}"


def width_of(wildcards):
    model = RUN.models[wildcards.model]
    return next(
        width(model.head_k_dim, v.ratio)
        for v in VARIANTS
        if v.model == wildcards.model and CUTS[v] == wildcards.cut and v.rft == "post"
    )


rule recover:
    input:
        student=student_of,
        teacher=f"{OUT}/models/{{model}}",
        tokens=lambda w: AT.tokens(RUN.recovery.data, w.model),
        preflight=lambda w: AT.preflight(RUN.models[w.model].kernel, width_of(w)),
    output:
        model=directory(f"{OUT}/recovered/{{model}}/{{cut}}"),
        provenance=f"{OUT}/recovered/{{model}}/{{cut}}.provenance.json",
    log:
        f"{OUT}/logs/recover/{{model}}/{{cut}}.log",
    benchmark:
        f"{OUT}/timings/recover/{{model}}-{{cut}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=48000,
        runtime=480,
    params:
        code=code("recover"),
        settings=RUN.recovery and RUN.recovery.model_dump(exclude={"control", "seeds"}),
        checkpoints=AT.checkpoints,
    message:
        "recovering {wildcards.model}, {wildcards.cut}"
    script:
        "../../scripts/recover.py"
