# One pass over text per model and seed, for all methods and ratios.


rule calibrate:
    input:
        unpack(
            lambda w: made(
                model=AT.base_model(w.model), tokens=AT.tokens(RUN.calibration.data, w.model)
            )
        ),
    output:
        folder=directory(f"{OUT}/calibrations/{{model}}/{{seed}}"),
        provenance=f"{OUT}/calibrations/{{model}}/{{seed}}.provenance.json",
    log:
        f"{OUT}/logs/calibrate/{{model}}-{{seed}}.log",
    benchmark:
        f"{OUT}/timings/calibrate/{{model}}-{{seed}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code("calibrate"),
        uses=lambda w: READS.uses_changed("calibration"),
    message:
        "calibrating {wildcards.model}, seed {wildcards.seed}"
    script:
        "../../scripts/calibrate.py"
