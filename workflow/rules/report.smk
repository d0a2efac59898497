# From results to what people read: frames, tables, figures, the verdict, one page and one PDF.

TEMPLATES = os.path.relpath(Path(workflow.basedir) / "templates")


rule frame:
    input:
        unpack(lambda w: made(sources=READS.of_table(w.table))),
    output:
        frame=f"{OUT}/frames/{{table}}.parquet",
        provenance=f"{OUT}/frames/{{table}}.parquet.provenance.json",
    log:
        f"{OUT}/logs/frame/{{table}}.log",
    benchmark:
        f"{OUT}/timings/frame/{{table}}.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("frame"),
        uses=lambda w: unlabelled(READS.uses_tables(w.table)),
        sources=lambda w: READS.sources_of_table(w.table),
    message:
        "collecting the numbers of {wildcards.table}"
    script:
        "../../scripts/frame.py"


rule union:
    input:
        **made(frames=[AT.frame(table) for table in RUN.tables]),
    output:
        frame=f"{OUT}/results.parquet",
        provenance=f"{OUT}/results.parquet.provenance.json",
    log:
        f"{OUT}/logs/union.log",
    benchmark:
        f"{OUT}/timings/union/results.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("union"),
        uses=READS.uses(),
    message:
        "joining all numbers"
    script:
        "../../scripts/union.py"


rule table:
    input:
        **made(frame=f"{OUT}/frames/{{table}}.parquet"),
        templates=lambda w: [
            f"{TEMPLATES}/{name}"
            for name in (
                "table.tex.j2",
                "table.html.j2",
                f"{RUN.tables[w.table].kind}.tex.j2",
            )
        ],
    output:
        tex=f"{OUT}/tables/{{table}}.tex",
        csv=f"{OUT}/tables/{{table}}.csv",
        html=report(
            f"{OUT}/tables/{{table}}.html",
            caption="../report/table.rst",
            category="Tables",
            labels={"table": "{table}"},
        ),
        provenance=f"{OUT}/tables/{{table}}.tex.provenance.json",
    log:
        f"{OUT}/logs/table/{{table}}.log",
    benchmark:
        f"{OUT}/timings/table/{{table}}.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("table"),
        uses=lambda w: READS.uses_tables(w.table),
        templates=lambda w, input: str(Path(input.templates[0]).parent),
    message:
        "printing {wildcards.table}"
    script:
        "../../scripts/table.py"


rule figure:
    input:
        unpack(lambda w: made(sources=READS.of_figure(w.figure))),
    output:
        pdf=f"{OUT}/figures/{{figure}}.pdf",
        svg=report(
            f"{OUT}/figures/{{figure}}.svg",
            caption="../report/figure.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        provenance=f"{OUT}/figures/{{figure}}.pdf.provenance.json",
    log:
        f"{OUT}/logs/figure/{{figure}}.log",
    benchmark:
        f"{OUT}/timings/figure/{{figure}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=4000,
        runtime=10,
    params:
        code=code("figure"),
        uses=lambda w: unlabelled(
            READS.uses_tables(figures=[w.figure]), of=("caption",)
        ),
        sources=lambda w: READS.sources_of_figure(w.figure),
    message:
        "drawing {wildcards.figure}"
    script:
        "../../scripts/figure.py"


rule document:
    input:
        **made(
            tables=[AT.table(table) for table in RUN.tables],
            figures=[AT.figure(figure) for figure in READS.figures()],
        ),
        templates=[f"{TEMPLATES}/document.tex.j2"],
    output:
        tex=f"{OUT}/document.tex",
        provenance=f"{OUT}/document.tex.provenance.json",
    log:
        f"{OUT}/logs/document.log",
    benchmark:
        f"{OUT}/timings/document/document.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("document"),
        uses=lambda w: READS.uses(figures=READS.figures()),
        templates=lambda w, input: str(Path(input.templates[0]).parent),
    message:
        "joining tables and figures in one document"
    script:
        "../../scripts/document.py"


rule pdf:
    input:
        **made(
            tex=f"{OUT}/document.tex",
            tables=[AT.table(table) for table in RUN.tables],
            figures=[AT.figure(figure) for figure in READS.figures()],
        ),
    output:
        pdf=f"{OUT}/document.pdf",
        provenance=f"{OUT}/document.pdf.provenance.json",
    log:
        f"{OUT}/logs/pdf.log",
    benchmark:
        f"{OUT}/timings/pdf/document.tsv"
    localrule: True
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("pdf"),
        uses=READS.uses(),
    message:
        "typesetting the document"
    script:
        "../../scripts/pdf.py"


rule verdict:
    input:
        **made(frames=[AT.frame(table) for table in RUN.tables]),
        published=["config/published/values.csv", "config/published/errata.csv"],
        claims="config/claims.yaml",
    output:
        folder=directory(f"{OUT}/verdict"),
        provenance=f"{OUT}/verdict.provenance.json",
    log:
        f"{OUT}/logs/verdict.log",
    benchmark:
        f"{OUT}/timings/verdict/verdict.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("verdict"),
        uses=lambda w: unlabelled(READS.uses_tables(*RUN.tables)),
    message:
        "comparing with the paper"
    script:
        "../../scripts/verdict.py"


rule page:
    input:
        **made(
            frames=[AT.frame(table) for table in RUN.tables],
            verdict=f"{OUT}/verdict",
            results=READS.of_tables(),
            drawn=[AT.figure(figure) for figure in READS.figures()],
        ),
        figures=ancient([AT.figure(figure, "svg") for figure in READS.figures()]),
        templates=[
            f"{TEMPLATES}/{name}"
            for name in ("report.html.j2", "report.css", "report.js", "table.html.j2")
        ],
    output:
        html=report(
            f"{OUT}/report.html", caption="../report/report.rst", category="Report"
        ),
        provenance=f"{OUT}/report.html.provenance.json",
    log:
        f"{OUT}/logs/page.log",
    benchmark:
        f"{OUT}/timings/page/report.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code("page"),
        uses=lambda w: READS.uses_tables(*RUN.tables, figures=READS.figures()),
        results=lambda w, output: str(Path(output.html).parent),
        curves=lambda w: [AT.curve(v) for v in READS.shown().variants()],
        steps=lambda w: [AT.steps(v) for v in READS.shown().variants()],
        now=lambda w: code_with_versions(),
        templates=lambda w, input: str(Path(input.templates[0]).parent),
    message:
        "writing the report"
    script:
        "../../scripts/page.py"


rule tables:
    input:
        [AT.table(table) for table in RUN.tables],
        f"{OUT}/results.parquet",


rule figures:
    input:
        [AT.figure(figure) for figure in READS.figures()],


# The PDF where there is a LaTeX to make it.
rule report:
    input:
        f"{OUT}/report.html",
        f"{OUT}/document.tex",
        [f"{OUT}/document.pdf"] if shutil.which("pdflatex") else [],


rule verify:
    input:
        **made(verdict=f"{OUT}/verdict"),
    log:
        f"{OUT}/logs/verify.log",
    localrule: True
    conda:
        "../../envs/report.yaml"
    params:
        code=code("verify"),
        uses=READS.uses(),
    message:
        "looking for numbers outside their tolerance"
    script:
        "../../scripts/verify.py"


# Here, and not on a node of a cluster: those have no network.
rule download:
    log:
        f"{OUT}/logs/download.log",
    localrule: True
    conda:
        "../../envs/model.yaml"
    params:
        code=code("download"),
        uses=lambda w: RUN.model_dump(mode="json"),
    message:
        "fetching what the run needs"
    script:
        "../../scripts/download.py"
