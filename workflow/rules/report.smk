# From results to what people read: frames, tables, figures, the verdict, one page and one PDF.

TEMPLATES = os.path.relpath(Path(workflow.basedir) / "templates")


rule frame:
    input:
        unpack(
            lambda w: with_provenance(sources=present(inputs.table_sources(w.table)))
        ),
    output:
        frame=f"{results}/frames/{{table}}.parquet",
        provenance=f"{results}/frames/{{table}}.parquet.provenance.json",
    log:
        f"{results}/logs/frame/{{table}}.log",
    benchmark:
        f"{results}/timings/frame/{{table}}.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("frame"),
        settings=lambda w: without_labels(inputs.table_settings(w.table)),
        sources=lambda w: inputs.table_sources(w.table),
    message:
        "collecting the numbers of {wildcards.table}"
    script:
        "../../scripts/frame.py"


rule union:
    input:
        **with_provenance(frames=[paths.frame(table) for table in run_config.tables]),
    output:
        frame=f"{results}/results.parquet",
        provenance=f"{results}/results.parquet.provenance.json",
    log:
        f"{results}/logs/union.log",
    benchmark:
        f"{results}/timings/union/results.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("union"),
        settings=inputs.settings(),
    message:
        "joining all numbers"
    script:
        "../../scripts/union.py"


rule table:
    input:
        **with_provenance(frame=f"{results}/frames/{{table}}.parquet"),
        templates=[f"{TEMPLATES}/{name}" for name in ("table.tex.j2", "table.html.j2")],
    output:
        tex=f"{results}/tables/{{table}}.tex",
        csv=f"{results}/tables/{{table}}.csv",
        html=report(
            f"{results}/tables/{{table}}.html",
            caption="../report/table.rst",
            category="Tables",
            labels={"table": "{table}"},
        ),
        provenance=f"{results}/tables/{{table}}.tex.provenance.json",
    log:
        f"{results}/logs/table/{{table}}.log",
    benchmark:
        f"{results}/timings/table/{{table}}.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("table"),
        settings=lambda w: inputs.table_settings(w.table),
        templates=lambda w, input: str(Path(input.templates[0]).parent),
    message:
        "printing {wildcards.table}"
    script:
        "../../scripts/table.py"


rule figure:
    input:
        unpack(
            lambda w: with_provenance(sources=present(inputs.figure_sources(w.figure)))
        ),
    output:
        pdf=f"{results}/figures/{{figure}}.pdf",
        svg=report(
            f"{results}/figures/{{figure}}.svg",
            caption="../report/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        provenance=f"{results}/figures/{{figure}}.pdf.provenance.json",
    log:
        f"{results}/logs/figure/{{figure}}.log",
    benchmark:
        f"{results}/timings/figure/{{figure}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=4000,
        runtime=10,
    params:
        code=code("figure"),
        settings=lambda w: without_labels(
            inputs.table_settings(figures=[w.figure]), keys=("caption",)
        ),
        sources=lambda w: inputs.figure_sources(w.figure),
    message:
        "drawing {wildcards.figure}"
    script:
        "../../scripts/figure.py"


rule document:
    input:
        **with_provenance(
            tables=[paths.table(table) for table in run_config.tables],
            figures=[paths.figure(figure) for figure in inputs.figures()],
        ),
        templates=[f"{TEMPLATES}/document.tex.j2"],
    output:
        tex=f"{results}/document.tex",
        provenance=f"{results}/document.tex.provenance.json",
    log:
        f"{results}/logs/document.log",
    benchmark:
        f"{results}/timings/document/document.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("document"),
        settings=lambda w: inputs.settings(figures=inputs.figures()),
        templates=lambda w, input: str(Path(input.templates[0]).parent),
    message:
        "joining tables and figures in one document"
    script:
        "../../scripts/document.py"


rule pdf:
    input:
        **with_provenance(
            tex=f"{results}/document.tex",
            tables=[paths.table(table) for table in run_config.tables],
            figures=[paths.figure(figure) for figure in inputs.figures()],
        ),
    output:
        pdf=f"{results}/document.pdf",
        provenance=f"{results}/document.pdf.provenance.json",
    log:
        f"{results}/logs/pdf.log",
    benchmark:
        f"{results}/timings/pdf/document.tsv"
    localrule: True
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("pdf"),
        settings=inputs.settings(),
    message:
        "typesetting the document"
    script:
        "../../scripts/pdf.py"


rule verdict:
    input:
        **with_provenance(frames=[paths.frame(table) for table in run_config.tables]),
        published=["config/published/values.csv", "config/published/errata.csv"],
        claims="config/claims.yaml",
    output:
        folder=directory(f"{results}/verdict"),
        provenance=f"{results}/verdict.provenance.json",
    log:
        f"{results}/logs/verdict.log",
    benchmark:
        f"{results}/timings/verdict/verdict.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("verdict"),
        settings=lambda w: without_labels(inputs.table_settings(*run_config.tables)),
    message:
        "comparing with the paper"
    script:
        "../../scripts/verdict.py"


rule page:
    input:
        **with_provenance(
            frames=[paths.frame(table) for table in run_config.tables],
            verdict=f"{results}/verdict",
            results=inputs.results(),
            drawn=[paths.figure(figure) for figure in inputs.figures()],
        ),
        figures=ancient([paths.figure(figure, "svg") for figure in inputs.figures()]),
        templates=[
            f"{TEMPLATES}/{name}"
            for name in ("report.html.j2", "report.css", "report.js", "table.html.j2")
        ],
    output:
        html=report(
            f"{results}/report.html", caption="../report/report.rst", category="Report"
        ),
        provenance=f"{results}/report.html.provenance.json",
    log:
        f"{results}/logs/page.log",
    benchmark:
        f"{results}/timings/page/report.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("page"),
        settings=lambda w: inputs.settings("about")
        | inputs.table_settings(*run_config.tables, figures=inputs.figures()),
        results=lambda w, output: str(Path(output.html).parent),
        curves=lambda w: [paths.curve(v) for v in inputs.shown().variants()],
        steps=lambda w: [paths.steps(v) for v in inputs.shown().variants()],
        current_code=lambda w: code_of_versions(),
        templates=lambda w, input: str(Path(input.templates[0]).parent),
    message:
        "writing the report"
    script:
        "../../scripts/page.py"


rule tables:
    input:
        [paths.table(table) for table in run_config.tables],
        f"{results}/results.parquet",


rule figures:
    input:
        [paths.figure(figure) for figure in inputs.figures()],


# The PDF where there is a LaTeX to make it.
rule report:
    input:
        f"{results}/report.html",
        f"{results}/document.tex",
        [f"{results}/document.pdf"] if shutil.which("pdflatex") else [],


# All that the above are made of, without weights and text.
rule archive:
    input:
        **with_provenance(
            tables=[paths.table(table) for table in run_config.tables],
            figures=[paths.figure(figure) for figure in inputs.figures()],
        ),
    output:
        archive=f"{results}/archive.tar.xz",
        provenance=f"{results}/archive.tar.xz.provenance.json",
    log:
        f"{results}/logs/archive.log",
    benchmark:
        f"{results}/timings/archive/archive.tsv"
    localrule: True
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("archive"),
        settings=run_config.model_dump(mode="json"),
    message:
        "packing the results without weights and text"
    script:
        "../../scripts/archive.py"


rule verify:
    input:
        **with_provenance(verdict=f"{results}/verdict"),
    log:
        f"{results}/logs/verify.log",
    localrule: True
    conda:
        "../../envs/report.yaml"
    params:
        code=code("verify"),
        settings=inputs.settings(),
    message:
        "looking for numbers outside their tolerance"
    script:
        "../../scripts/verify.py"


# Here, and not on a node of a cluster: those have no network.
rule download:
    log:
        f"{results}/logs/download.log",
    localrule: True
    conda:
        "../../envs/model.yaml"
    params:
        code=code("download"),
        settings=lambda w: run_config.model_dump(mode="json"),
    message:
        "fetching what the run needs"
    script:
        "../../scripts/download.py"
