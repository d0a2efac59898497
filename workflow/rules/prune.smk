# From a base model to smaller ones: calibrate, choose channels, slice, refit.

CUT = "{model}/{method}-{target}-{ratio}-{seed}{eps}"


# A forward pass over text per model and seed, for all methods and ratios. Methods that need
# gradients, or that choose value channels, have a separate calibration.
rule calibrate:
    input:
        model=f"{results}/models/{{model}}",
        tokens=lambda w: paths.tokens(run_config.calibration.data, w.model),
    output:
        directory(f"{results}/calibrations/{{model}}/{{seed}}{{backward}}{{values}}"),
    log:
        f"{results}/logs/calibrate/{{model}}-{{seed}}{{backward}}{{values}}.log",
    wildcard_constraints:
        backward="(-gradients)?",
        values="(-values)?",
    priority: 3
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=24000,
        runtime=60,
    params:
        code=code("scripts/calibrate.py"),
        settings=lambda w: inputs.section_settings("calibration"),
    message:
        "calibrating {wildcards.model}, seed {wildcards.seed}{wildcards.backward}{wildcards.values}"
    script:
        "../../scripts/calibrate.py"


# Which channels stay, at every width.
rule score:
    input:
        model=f"{results}/models/{{model}}",
        calibration=lambda w: inputs.calibration(w.model, w.method, w.target, w.seed),
    output:
        f"{results}/selections/{{model}}/{{method}}-{{target}}-{{seed}}.safetensors",
    log:
        f"{results}/logs/score/{{model}}/{{method}}-{{target}}-{{seed}}.log",
    priority: 2
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=8000,
        runtime=30,
    params:
        code=lambda w: code(
            "scripts/score.py",
            "src/statecut/pruning/select.py",
            "src/statecut/pruning/selection.py",
            "src/statecut/pruning/statistics.py",
            *inputs.method_code(w.method),
        ),
        settings=lambda w: inputs.method_settings(w.method),
    message:
        "choosing channels of {wildcards.model}: {wildcards.method}, {wildcards.target}, seed {wildcards.seed}"
    script:
        "../../scripts/score.py"


# Smaller models. Not temp(): to make one again would plan its recovery again.
rule slice:
    input:
        model=f"{results}/models/{{model}}",
        selections=inputs.selections,
    output:
        directory(f"{results}/sliced/{CUT}"),
    log:
        f"{results}/logs/slice/{CUT}.log",
    priority: 2
    conda:
        "../../envs/model.yaml"
    resources:
        mem_mb=10000,
        runtime=30,
    params:
        code=lambda w: code(
            "scripts/slice.py",
            "src/statecut/pruning/slicing.py",
            inputs.adapter(w.model),
        ),
        widths=lambda w: inputs.widths(w.model, w.ratio),
    message:
        "slicing {wildcards.model}: {wildcards.method}, {wildcards.target}, {wildcards.ratio}, seed {wildcards.seed}{wildcards.eps}"
    script:
        "../../scripts/slice.py"


# What is linear behind every cut, fitted again, where a table asks for it.
rule refit:
    input:
        student=f"{results}/sliced/{CUT}",
        teacher=f"{results}/models/{{model}}",
        tokens=lambda w: paths.tokens(run_config.calibration.data, w.model),
    output:
        directory(f"{results}/refitted/{CUT}"),
    log:
        f"{results}/logs/refit/{CUT}.log",
    priority: 1
    conda:
        "../../envs/model.yaml"
    resources:
        gpu=1,
        mem_mb=24000,
        runtime=60,
    params:
        code=code("scripts/refit.py", "src/statecut/pruning/refit.py"),
        settings=lambda w: inputs.section_settings("calibration"),
    message:
        "refitting {wildcards.model}: {wildcards.method}, {wildcards.target}, {wildcards.ratio}, seed {wildcards.seed}{wildcards.eps}"
    script:
        "../../scripts/refit.py"
