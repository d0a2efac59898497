"""Write environment.yml and envs/*.yaml from envs/constraints.txt.

Snakemake copies an environment file before it builds it, so these cannot point at the constraints;
they repeat them, and tests/test_pins.py fails when they say anything else. Run by `make pins`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "envs" / "constraints.txt"

MODEL = [
    "torch", "triton", "flash-linear-attention", "fla-core", "transformers", "peft", "lm_eval",
    "datasets", "safetensors", "huggingface_hub", "tokenizers", "sentencepiece", "pyarrow",
    "numpy", "scipy", "matplotlib", "pydantic", "PyYAML",
]  # fmt: skip
REPORT = ["pandas", "pandera", "pyarrow", "Jinja2", "matplotlib", "numpy", "pydantic", "PyYAML"]
WORKFLOW = ["snakemake", "snakemake-executor-plugin-slurm"]

ENVIRONMENTS = {
    "environment.yml": ("keycut", sorted({*MODEL, *REPORT, *WORKFLOW}, key=str.lower)),
    "envs/model.yaml": ("keycut-model", sorted(MODEL, key=str.lower)),
    "envs/report.yaml": ("keycut-report", sorted(REPORT, key=str.lower)),
}


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def environment(name: str, packages: list[str]) -> str:
    versions = pins()
    listed = "".join(f"      - {package}=={versions[package]}\n" for package in packages)
    return (
        "# Written by `make pins` from envs/constraints.txt: change that file instead.\n"
        f"name: {name}\n"
        "channels:\n  - conda-forge\n  - nodefaults\n"
        f"dependencies:\n  - python=3.11\n  - pip\n  - pip:\n{listed}"
    )


if __name__ == "__main__":
    for file, (name, packages) in ENVIRONMENTS.items():
        (ROOT / file).write_text(environment(name, packages))
        print(f"wrote {file}")
