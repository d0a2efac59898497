# Recovery of every pruned model that a table shows recovered, and of the unpruned one as control.


rule recover:
    input:
        unpack(
            lambda w: made(
                student=READS.student(w.model, w.cut),
                teacher=AT.base_model(w.model),
                tokens=AT.tokens(RUN.recovery.data, w.model),
                preflight=READS.preflight_of_student(w.model, w.cut),
            )
        ),
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
        parts=lambda w: RUN.recovery.parts,
    params:
        code=code("recover"),
        uses=lambda w: READS.uses_recovery(),
        checkpoints=AT.checkpoints,
    message:
        "recovering {wildcards.model}, {wildcards.cut}"
    script:
        "../../scripts/recover.py"
