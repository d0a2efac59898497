# One model on one suite, one JSON; and the demo's own tasks, which are made from its text.

MADE = READS.made_tasks()


if MADE:

    rule tasks:
        input:
            **made(
                tokens=AT.tokens(RUN.evaluation.made_from, next(iter(RUN.models))),
                tokenizer=READS.tokenizer(next(iter(RUN.models))),
            ),
        output:
            MADE,
            provenance=f"{MADE[0]}.provenance.json",
        log:
            f"{OUT}/logs/tasks.log",
        benchmark:
            f"{OUT}/timings/tasks/tasks.tsv"
        conda:
            "../../envs/model.yaml"
        resources:
            mem_mb=2000,
            runtime=10,
        params:
            code=code("tasks"),
            data=RUN.evaluation.made_from,
        message:
            "making the demo's tasks"
        script:
            "../../scripts/tasks.py"


rule evaluate:
    input:
        unpack(
            lambda w: made(model=f"{OUT}/{w.subject}", files=READS.task_files(w.suite))
        ),
    output:
        result=f"{OUT}/evaluations/{{subject}}/{{suite}}.json",
        provenance=f"{OUT}/evaluations/{{subject}}/{{suite}}.json.provenance.json",
    log:
        f"{OUT}/logs/evaluate/{{subject}}/{{suite}}.log",
    benchmark:
        f"{OUT}/timings/evaluate/{{subject}}/{{suite}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=240,
    params:
        code=code("evaluate"),
        uses=lambda w: READS.uses_suite(w.suite),
        given=lambda w: READS.digests(READS.task_files(w.suite)),
        data=lambda w: READS.task_data(w.suite),
        checkpoints=AT.checkpoints,
    message:
        "evaluating {wildcards.subject} on {wildcards.suite}"
    script:
        "../../scripts/evaluate.py"
