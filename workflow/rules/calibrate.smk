# A forward pass over text per model and seed, for all methods and ratios, and one with a backward
# pass for those that need gradients.


rule calibrate:
    input:
        unpack(
            lambda w: with_provenance(
                model=paths.base_model(w.model),
                tokens=paths.tokens(run_config.calibration.data, w.model),
            )
        ),
    output:
        folder=directory(f"{results}/calibrations/{{model}}/{{seed}}{{backward}}"),
        provenance=f"{results}/calibrations/{{model}}/{{seed}}{{backward}}.provenance.json",
    log:
        f"{results}/logs/calibrate/{{model}}-{{seed}}{{backward}}.log",
    benchmark:
        f"{results}/timings/calibrate/{{model}}-{{seed}}{{backward}}.tsv"
    wildcard_constraints:
        seed=r"\d+",
        backward="(-gradients)?",
    priority: 3
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=32000,
        runtime=60,
    params:
        code=code("calibrate"),
        settings=lambda w: inputs.section_settings("calibration"),
    message:
        "calibrating {wildcards.model}, seed {wildcards.seed}"
    script:
        "../../scripts/calibrate.py"
