# Recovery of every pruned model that a table shows recovered, and of the unpruned one as control.


rule recover:
    input:
        student=lambda w: inputs.student(w.model, w.cut),
        teacher=f"{results}/models/{{model}}",
        tokens=lambda w: paths.tokens(run_config.recovery.data, w.model),
        preflight=lambda w: inputs.student_preflight(w.model, w.cut),
    output:
        directory(f"{results}/recovered/{{model}}/{{cut}}"),
    log:
        f"{results}/logs/recover/{{model}}/{{cut}}.log",
    priority: 1
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=24000,
        runtime=240,
        gradient_accumulation_steps=lambda w: run_config.recovery.gradient_accumulation_steps,
    params:
        code=code("scripts/recover.py"),
        settings=lambda w: inputs.recovery_settings(w.model, w.cut),
        checkpoints=paths.checkpoints,
    message:
        "recovering {wildcards.model}, {wildcards.cut}"
    script:
        "../../scripts/recover.py"
