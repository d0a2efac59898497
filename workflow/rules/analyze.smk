# The states of a model along one sequence: effective ranks, and spectra of heads in figures.


rule analyze:
    input:
        unpack(
            lambda w: made(
                model=f"{OUT}/{w.subject}",
                tokens=AT.tokens(RUN.analysis.data, w.subject.split("/")[1]),
            )
        ),
    output:
        result=f"{OUT}/analyses/{{subject}}.npz",
        provenance=f"{OUT}/analyses/{{subject}}.npz.provenance.json",
    log:
        f"{OUT}/logs/analyze/{{subject}}.log",
    benchmark:
        f"{OUT}/timings/analyze/{{subject}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code("analyze"),
        uses=READS.uses("device", "analysis"),
        heads=lambda w: READS.heads(w.subject),
        length=lambda w: READS.length(w.subject),
    message:
        "analysing the states of {wildcards.subject}"
    script:
        "../../scripts/analyze.py"
