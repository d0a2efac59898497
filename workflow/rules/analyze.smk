# The states of a model along one sequence: effective ranks, and spectra of heads in figures.


rule analyze:
    input:
        unpack(
            lambda w: with_provenance(
                model=f"{results}/{w.subject}",
                tokens=paths.tokens(run_config.analysis.data, w.subject.split("/")[1]),
            )
        ),
    output:
        result=f"{results}/analyses/{{subject}}.npz",
        provenance=f"{results}/analyses/{{subject}}.npz.provenance.json",
    log:
        f"{results}/logs/analyze/{{subject}}.log",
    benchmark:
        f"{results}/timings/analyze/{{subject}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=lambda w: known_code("analyze", inputs.adapter(w.subject)),
        settings=inputs.settings("device", "analysis"),
        heads=lambda w: inputs.heads(w.subject),
        length=lambda w: inputs.length(w.subject),
    message:
        "analysing the states of {wildcards.subject}"
    script:
        "../../scripts/analyze.py"
