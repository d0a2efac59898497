# Text to tokens: the demo's text, tokenizers, and corpora packed for the models that read them.


rule text:
    output:
        text=f"{OUT}/text/documentation.jsonl",
        provenance=f"{OUT}/text/documentation.jsonl.provenance.json",
    log:
        f"{OUT}/logs/text.log",
    benchmark:
        f"{OUT}/timings/text/documentation.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("text"),
    message:
        "reading the documentation of the installed packages"
    script:
        "../../scripts/text.py"


rule tokenizer:
    input:
        unpack(lambda w: made(text=READS.tokenizer_text(w.tokenizer))),
    output:
        folder=directory(f"{OUT}/tokenizers/{{tokenizer}}"),
        provenance=f"{OUT}/tokenizers/{{tokenizer}}.provenance.json",
    log:
        f"{OUT}/logs/tokenizer/{{tokenizer}}.log",
    benchmark:
        f"{OUT}/timings/tokenizer/{{tokenizer}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        code=code("tokenizer"),
        uses=lambda w: READS.uses_tokenizer(w.tokenizer),
        given=lambda w: READS.digests(READS.tokenizer_text(w.tokenizer)),
        commit=lambda w: READS.commit("model", RUN.tokenizers[w.tokenizer]),
    message:
        "making tokenizer {wildcards.tokenizer}"
    script:
        "../../scripts/tokenizer.py"


rule tokens:
    input:
        unpack(
            lambda w: made(
                tokenizer=f"{OUT}/tokenizers/{w.tokenizer}",
                text=READS.text(w.corpus),
            )
        ),
    output:
        folder=directory(f"{OUT}/tokens/{{corpus}}/{{tokenizer}}"),
        provenance=f"{OUT}/tokens/{{corpus}}/{{tokenizer}}.provenance.json",
    log:
        f"{OUT}/logs/tokens/{{corpus}}-{{tokenizer}}.log",
    benchmark:
        f"{OUT}/timings/tokens/{{corpus}}-{{tokenizer}}.tsv"
    conda:
        "../../envs/model.yaml"
    threads: 16
    resources:
        mem_mb=16000,
        runtime=720,
    params:
        code=code("tokens"),
        uses=lambda w: READS.uses_corpus(w.corpus),
        given=lambda w: READS.digests(READS.text(w.corpus)),
        commit=lambda w: READS.commit("dataset", RUN.corpora[w.corpus]),
    message:
        "packing {wildcards.corpus} for {wildcards.tokenizer}"
    script:
        "../../scripts/tokens.py"
