# One model on one suite, one JSON; and the demo's own tasks, which are made from its text.

DEMO_TASKS = inputs.demo_tasks()


if DEMO_TASKS:

    rule tasks:
        input:
            **with_provenance(
                tokens=paths.tokens(
                    run_config.evaluation.made_from, next(iter(run_config.models))
                ),
                tokenizer=inputs.tokenizer(next(iter(run_config.models))),
            ),
        output:
            DEMO_TASKS,
            provenance=f"{DEMO_TASKS[0]}.provenance.json",
        log:
            f"{results}/logs/tasks.log",
        benchmark:
            f"{results}/timings/tasks/tasks.tsv"
        conda:
            "../../envs/model.yaml"
        resources:
            mem_mb=2000,
            runtime=10,
        params:
            code=code("tasks"),
            data=run_config.evaluation.made_from,
        message:
            "making the demo's tasks"
        script:
            "../../scripts/tasks.py"


rule evaluate:
    input:
        unpack(
            lambda w: with_provenance(
                model=f"{results}/{w.subject}", files=inputs.task_files(w.suite)
            )
        ),
    output:
        result=f"{results}/evaluations/{{subject}}/{{suite}}.json",
        provenance=f"{results}/evaluations/{{subject}}/{{suite}}.json.provenance.json",
    log:
        f"{results}/logs/evaluate/{{subject}}/{{suite}}.log",
    benchmark:
        f"{results}/timings/evaluate/{{subject}}/{{suite}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=240,
    params:
        code=lambda w: known_code("evaluate", inputs.adapter(w.subject)),
        settings=lambda w: inputs.suite_settings(w.suite),
        user_files=lambda w: inputs.user_digests(inputs.task_files(w.suite)),
        data=lambda w: inputs.task_data(w.suite),
        checkpoints=paths.checkpoints,
    message:
        "evaluating {wildcards.subject} on {wildcards.suite}"
    script:
        "../../scripts/evaluate.py"
