# Smaller models. They stay: to make one again would recover it again too.


rule slice:
    input:
        **with_provenance(
            model=f"{results}/models/{{model}}",
            selection=f"{results}/selections/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}.safetensors",
        ),
    output:
        model=directory(
            f"{results}/sliced/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}"
        ),
        provenance=f"{results}/sliced/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}.provenance.json",
    log:
        f"{results}/logs/slice/{{model}}/{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}.log",
    benchmark:
        f"{results}/timings/slice/{{model}}-{{method}}-{{target}}-{{ratio}}-{{seed}}{{eps}}.tsv"
    priority: 2
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=16000,
        runtime=30,
    params:
        code=code("slice"),
    message:
        "slicing {wildcards.model}: {wildcards.method}, {wildcards.target}, {wildcards.ratio}, seed {wildcards.seed}{wildcards.eps}"
    script:
        "../../scripts/slice.py"
