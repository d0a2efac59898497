# Text to tokens: the demo's text, tokenizers, and corpora packed for the models that read them.


DOCUMENTATION = inputs.documentation()


if DOCUMENTATION:

    rule text:
        output:
            [*DOCUMENTATION],
            provenance=f"{next(iter(DOCUMENTATION))}.provenance.json",
        log:
            f"{results}/logs/text.log",
        benchmark:
            f"{results}/timings/text/documentation.tsv"
        conda:
            "../../envs/model.yaml"
        resources:
            mem_mb=2000,
            runtime=10,
        params:
            code=code("text"),
            parts=[*DOCUMENTATION.values()],
        message:
            "reading the documentation of the installed packages"
        script:
            "../../scripts/text.py"


rule tokenizer:
    input:
        unpack(lambda w: with_provenance(text=inputs.tokenizer_text(w.tokenizer))),
    output:
        folder=directory(f"{results}/tokenizers/{{tokenizer}}"),
        provenance=f"{results}/tokenizers/{{tokenizer}}.provenance.json",
    log:
        f"{results}/logs/tokenizer/{{tokenizer}}.log",
    benchmark:
        f"{results}/timings/tokenizer/{{tokenizer}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        code=code("tokenizer"),
        settings=lambda w: inputs.tokenizer_settings(w.tokenizer),
        user_files=lambda w: inputs.user_digests(inputs.tokenizer_text(w.tokenizer)),
        commit=lambda w: inputs.commit("model", run_config.tokenizers[w.tokenizer]),
    message:
        "making tokenizer {wildcards.tokenizer}"
    script:
        "../../scripts/tokenizer.py"


rule tokens:
    input:
        unpack(
            lambda w: with_provenance(
                tokenizer=f"{results}/tokenizers/{w.tokenizer}",
                text=inputs.text(w.corpus),
            )
        ),
    output:
        folder=directory(f"{results}/tokens/{{corpus}}/{{tokenizer}}"),
        provenance=f"{results}/tokens/{{corpus}}/{{tokenizer}}.provenance.json",
    log:
        f"{results}/logs/tokens/{{corpus}}-{{tokenizer}}.log",
    benchmark:
        f"{results}/timings/tokens/{{corpus}}-{{tokenizer}}.tsv"
    conda:
        "../../envs/model.yaml"
    threads: 16
    resources:
        mem_mb=16000,
        runtime=720,
    params:
        code=code("tokens"),
        settings=lambda w: inputs.corpus_settings(w.corpus),
        user_files=lambda w: inputs.user_digests(inputs.text(w.corpus)),
        commit=lambda w: inputs.commit("dataset", run_config.corpora[w.corpus]),
    message:
        "packing {wildcards.corpus} for {wildcards.tokenizer}"
    script:
        "../../scripts/tokens.py"
