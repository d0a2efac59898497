from keycut.job import job

with job(snakemake) as config:
    from keycut.inputs import Inputs
    from keycut.reporting.steps import make_document

    make_document(
        Inputs(config).shown(),
        snakemake.input.tables,
        snakemake.input.figures,
        snakemake.output.tex,
        snakemake.params.templates,
    )
