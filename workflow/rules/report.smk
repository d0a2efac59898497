# From results to what people read: tables, figures, the verdict, one page and one PDF.

REPORTING = code("src/reproduction/reporting", "workflow/templates")
FRAMES = [paths.frame(table) for table in run_config.tables]
TABLES = {
    ending: [paths.table(table, ending) for table in run_config.tables]
    for ending in ("tex", "csv", "html", "md")
}
FIGURES = {
    ending: [paths.figure(figure, ending) for figure in inputs.figures()]
    for ending in ("pdf", "svg")
}
# The PDF where there is a LaTeX to make it.
DOCUMENT = [f"{results}/document.tex"]
DOCUMENT += [f"{results}/document.pdf"] if shutil.which("pdflatex") else []
JUDGED_BY = ["config/published", "config/claims.yaml"]
LIGHT = {"mem_mb": 4000, "runtime": 10}


# A table and its numbers.
rule table:
    input:
        lambda w: present(inputs.table_sources(w.table)),
    output:
        tex=f"{results}/tables/{{table}}.tex",
        csv=f"{results}/tables/{{table}}.csv",
        html=report(f"{results}/tables/{{table}}.html", category="Tables"),
        md=f"{results}/tables/{{table}}.md",
        frame=f"{results}/frames/{{table}}.parquet",
    log:
        f"{results}/logs/table/{{table}}.log",
    conda:
        "../../envs/report.yaml"
    resources:
        **LIGHT,
    params:
        code=REPORTING | code("scripts/table.py"),
        settings=lambda w: inputs.table_settings(w.table),
        sources=lambda w: inputs.table_sources(w.table),
    message:
        "printing {wildcards.table}"
    script:
        "../../scripts/table.py"


rule figure:
    input:
        lambda w: present(inputs.figure_sources(w.figure)),
    output:
        f"{results}/figures/{{figure}}.pdf",
        report(f"{results}/figures/{{figure}}.svg", category="Figures"),
    log:
        f"{results}/logs/figure/{{figure}}.log",
    conda:
        "../../envs/model.yaml"
    resources:
        **LIGHT,
    params:
        code=REPORTING | code("scripts/figure.py"),
        settings=lambda w: without_labels(
            inputs.table_settings(figures=[w.figure]), keys=("caption",)
        ),
        sources=lambda w: inputs.figure_sources(w.figure),
    message:
        "drawing {wildcards.figure}"
    script:
        "../../scripts/figure.py"


# All numbers, and what they say of the paper's.
rule verdict:
    input:
        FRAMES,
    output:
        folder=report(
            directory(f"{results}/verdict"),
            patterns=["{file}.csv", "{file}.txt"],
            category="Verdict",
        ),
        frame=f"{results}/results.parquet",
    log:
        f"{results}/logs/verdict.log",
    conda:
        "../../envs/report.yaml"
    resources:
        **LIGHT,
    params:
        code=REPORTING | code("scripts/verdict.py", *JUDGED_BY),
        settings=lambda w: without_labels(inputs.table_settings(*run_config.tables)),
    message:
        "comparing with the paper"
    script:
        "../../scripts/verdict.py"


rule document:
    input:
        tables=TABLES["tex"],
        figures=FIGURES["pdf"],
    output:
        report(DOCUMENT, category="Report"),
    log:
        f"{results}/logs/document.log",
    localrule: True
    conda:
        "../../envs/report.yaml"
    params:
        code=REPORTING | code("scripts/document.py"),
        settings=lambda w: inputs.settings(figures=inputs.figures()),
    message:
        "joining tables and figures in one document"
    script:
        "../../scripts/document.py"


rule page:
    input:
        frames=FRAMES,
        results=inputs.results(),
        figures=FIGURES["svg"],
    output:
        report(f"{results}/report.html", category="Report"),
    log:
        f"{results}/logs/page.log",
    conda:
        "../../envs/report.yaml"
    resources:
        **LIGHT,
    params:
        code=REPORTING | code("scripts/page.py", *JUDGED_BY),
        settings=lambda w: inputs.settings("about")
        | inputs.table_settings(*run_config.tables, figures=inputs.figures()),
    message:
        "writing the report"
    script:
        "../../scripts/page.py"


rule tables:
    input:
        *TABLES.values(),
        f"{results}/results.parquet",


rule figures:
    input:
        *FIGURES.values(),


rule report:
    input:
        f"{results}/report.html",
        DOCUMENT,


# All that the above are made of, without weights and text.
rule archive:
    input:
        TABLES["tex"],
        FIGURES["pdf"],
    output:
        f"{results}/archive.tar.xz",
    log:
        f"{results}/logs/archive.log",
    localrule: True
    conda:
        "../../envs/model.yaml"
    params:
        code=REPORTING | code("scripts/archive.py"),
        settings=run_config.model_dump(mode="json"),
    message:
        "packing the results without weights and text"
    script:
        "../../scripts/archive.py"
