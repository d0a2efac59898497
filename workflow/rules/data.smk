# Text to tokens: a tokenizer, then every corpus packed by the tokenizer of the models that read it.


def packed_corpora():
    return [f"{OUT}/tokens/{corpus}/{tokenizer}" for corpus, tokenizer in RUN.packed()]


rule tokenizer:
    output:
        directory(f"{OUT}/tokenizers/{{tokenizer}}"),
    log:
        f"{OUT}/logs/tokenizer/{{tokenizer}}.log",
    benchmark:
        f"{OUT}/benchmarks/tokenizer/{{tokenizer}}.tsv"
    wildcard_constraints:
        tokenizer="|".join(RUN.tokenizers),
    conda:
        "../../envs/model.yaml"
    params:
        spec=lambda wildcards: RUN.tokenizers[wildcards.tokenizer].model_dump(),
    script:
        "../../scripts/tokenizer.py"


rule tokens:
    input:
        tokenizer=f"{OUT}/tokenizers/{{tokenizer}}",
    output:
        directory(f"{OUT}/tokens/{{corpus}}/{{tokenizer}}"),
    log:
        f"{OUT}/logs/tokens/{{corpus}}.{{tokenizer}}.log",
    benchmark:
        f"{OUT}/benchmarks/tokens/{{corpus}}.{{tokenizer}}.tsv"
    wildcard_constraints:
        corpus="|".join(RUN.corpora),
        tokenizer="|".join(RUN.tokenizers),
    conda:
        "../../envs/model.yaml"
    threads: 2
    params:
        spec=lambda wildcards: RUN.corpora[wildcards.corpus].model_dump(),
    script:
        "../../scripts/tokens.py"
