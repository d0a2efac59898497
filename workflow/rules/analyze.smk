# The states of a model along one sequence: effective ranks, and spectra of the heads that figures show.


def heads_of(wildcards):
    shown = RUN.figures.items()
    return sorted(
        {
            (figure.layer, figure.head)
            for name, figure in shown
            if figure.kind == "spectrum"
            and wildcards.subject in {AT.subject(v) for v in RUN.analyses(name)}
        }
    )


def tokens_of(wildcards):
    # The longest stretch that a figure of this model shows.
    return max(
        figure.tokens
        for name, figure in RUN.figures.items()
        if figure.kind in ("spectrum", "utilization")
        and wildcards.subject in {AT.subject(v) for v in RUN.analyses(name)}
    )


rule analyze:
    input:
        model=f"{OUT}/{{subject}}",
        tokens=lambda w: AT.tokens(RUN.analysis.data, w.subject.split("/")[1]),
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
        settings=RUN.analysis and RUN.analysis.model_dump(),
        heads=heads_of,
        length=tokens_of,
    message:
        "analysing the states of {wildcards.subject}"
    script:
        "../../scripts/analyze.py"
