# One pass over text per model and seed, for all methods and ratios.


rule calibrate:
    input:
        unpack(
            lambda w: with_provenance(
                model=paths.base_model(w.model),
                tokens=paths.tokens(run_config.calibration.data, w.model),
            )
        ),
    output:
        folder=directory(f"{results}/calibrations/{{model}}/{{seed}}"),
        provenance=f"{results}/calibrations/{{model}}/{{seed}}.provenance.json",
    log:
        f"{results}/logs/calibrate/{{model}}-{{seed}}.log",
    benchmark:
        f"{results}/timings/calibrate/{{model}}-{{seed}}.tsv"
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code("calibrate"),
        settings=lambda w: inputs.calibration_settings(w.model),
    message:
        "calibrating {wildcards.model}, seed {wildcards.seed}"
    script:
        "../../scripts/calibrate.py"
