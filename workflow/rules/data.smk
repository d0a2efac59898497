# Text to tokens: the demo's text and tasks, tokenizers, and corpora packed for the models that read
# them.

DOCUMENTATION = inputs.documentation()
DEMO_TASKS = inputs.demo_tasks()


if DOCUMENTATION:

    rule text:
        output:
            [*DOCUMENTATION],
        log:
            f"{results}/logs/text.log",
        priority: 4
        conda:
            "../../envs/model.yaml"
        resources:
            mem_mb=2000,
            runtime=10,
        params:
            code=code("scripts/text.py"),
            parts=[*DOCUMENTATION.values()],
        message:
            "reading the documentation of the installed packages"
        script:
            "../../scripts/text.py"


rule tokenizer:
    input:
        text=lambda w: inputs.tokenizer_text(w.tokenizer),
    output:
        directory(f"{results}/tokenizers/{{tokenizer}}"),
    log:
        f"{results}/logs/tokenizer/{{tokenizer}}.log",
    priority: 4
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        code=code("scripts/tokenizer.py"),
        settings=lambda w: inputs.tokenizer_settings(w.tokenizer),
        commit=lambda w: inputs.commit("model", run_config.tokenizers[w.tokenizer]),
    message:
        "making tokenizer {wildcards.tokenizer}"
    script:
        "../../scripts/tokenizer.py"


rule tokens:
    input:
        tokenizer=f"{results}/tokenizers/{{tokenizer}}",
        text=lambda w: inputs.text(w.corpus),
    output:
        directory(f"{results}/tokens/{{corpus}}/{{tokenizer}}"),
    log:
        f"{results}/logs/tokens/{{corpus}}-{{tokenizer}}.log",
    priority: 4
    conda:
        "../../envs/model.yaml"
    threads: 16
    resources:
        mem_mb=16000,
        runtime=720,
    params:
        code=code("scripts/tokens.py"),
        settings=lambda w: inputs.corpus_settings(w.corpus),
        commit=lambda w: inputs.commit("dataset", run_config.corpora[w.corpus]),
    message:
        "packing {wildcards.corpus} for {wildcards.tokenizer}"
    script:
        "../../scripts/tokens.py"


if DEMO_TASKS:

    rule tasks:
        input:
            tokens=paths.tokens(
                run_config.evaluation.made_from, next(iter(run_config.models))
            ),
            tokenizer=inputs.tokenizer(next(iter(run_config.models))),
        output:
            DEMO_TASKS,
        log:
            f"{results}/logs/tasks.log",
        conda:
            "../../envs/model.yaml"
        resources:
            mem_mb=2000,
            runtime=10,
        params:
            code=code("scripts/tasks.py", "src/reproduction/suites/demo.py"),
            data=run_config.evaluation.made_from,
        message:
            "making the demo's tasks"
        script:
            "../../scripts/tasks.py"
