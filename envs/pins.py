"""Write environment.yml and envs/*.yaml from envs/constraints.txt, and what adds flame to them.

Snakemake copies an environment file before it builds it, so these cannot point at the constraints;
they repeat them, and tests/test_pins.py fails when they say anything else. Run by `make pins`.
"""

import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "envs" / "constraints.txt"
FLAME = ROOT / "envs" / "flame.txt"

MODEL = [
    "torch", "triton", "flash-linear-attention", "fla-core", "transformers", "peft", "lm_eval",
    "datasets", "safetensors", "huggingface_hub", "tokenizers", "sentencepiece", "pyarrow",
    "numpy", "scipy", "pandas", "matplotlib", "pydantic", "PyYAML",
]  # fmt: skip
REPORT = ["pandas", "pyarrow", "Jinja2", "matplotlib", "numpy", "pydantic", "PyYAML"]
WORKFLOW = ["snakemake", "snakemake-executor-plugin-slurm"]

ENVIRONMENTS = {
    "environment.yml": ("statecut", sorted({*MODEL, *REPORT, *WORKFLOW}, key=str.lower)),
    "envs/model.yaml": ("statecut-model", sorted(MODEL, key=str.lower)),
    "envs/pretrain.yaml": ("statecut-pretrain", sorted(MODEL, key=str.lower), ("git",)),
    "envs/report.yaml": ("statecut-report", sorted(REPORT, key=str.lower)),
}


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def environment(name: str, packages: list[str], besides: tuple[str, ...] = ()) -> str:
    versions = pins()
    own = "".join(f"  - {package}\n" for package in ("python=3.11", "pip", *besides))
    listed = "".join(f"      - {package}=={versions[package]}\n" for package in packages)
    return (
        "# Written by `make pins` from envs/constraints.txt: change that file instead.\n"
        f"name: {name}\n"
        "channels:\n  - conda-forge\n  - nodefaults\n"
        f"dependencies:\n{own}  - pip:\n{listed}"
    )


def flame_script() -> str:
    """What Snakemake runs in the environment of rule pretrain once that is made, by its name."""
    lines = (line.strip() for line in FLAME.read_text().splitlines())
    listed = [shlex.quote(line) for line in lines if line and not line.startswith("#")]
    install = ["python -m pip install --no-deps --no-build-isolation", *listed]
    return (
        "#!/usr/bin/env bash\n"
        "# Written by `make pins` from envs/flame.txt, which says why: change that file instead.\n"
        + " \\\n  ".join(install)
        + "\n"
    )


if __name__ == "__main__":
    written = {file: environment(*given) for file, given in ENVIRONMENTS.items()}
    for file, text in {**written, "envs/pretrain.post-deploy.sh": flame_script()}.items():
        (ROOT / file).write_text(text)
        print(f"wrote {file}")
