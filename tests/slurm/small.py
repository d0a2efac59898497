"""A small run, cut out of the demo: one model, a few steps, one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RUN = "small"
DATA = (f"results/{RUN}/tasks/demo_prose.jsonl", "preflight")
"""Targets that need no model."""
TARGET = f"results/{RUN}/frames/by_ratio.parquet"
"""Training, recoveries and evaluations."""
TRAINED = f"results/{RUN}/evaluations/models/delta_net/ppl.json"
"""Training and one evaluation."""


def small(
    *, steps: int, recovery: int, methods: tuple[str, ...] = ("l1", "rand")
) -> dict[str, Any]:
    """The configuration, as it would be read from a file."""
    text = (ROOT / "config" / "demo.yaml").read_text().replace("results/demo/", f"results/{RUN}/")
    config = yaml.safe_load(text)
    config["run"] = RUN
    slices = {
        "documentation": {"recovery": 8 * recovery, "pretraining": 8 * steps},
        "calibration": {"sequences": 16},
        "held_out": {"tasks": 32},
    }
    for name, corpus in config["corpora"].items():
        corpus["slices"] = slices[name]
    config["recipes"] = {"demo": {**config["recipes"]["demo"], "steps": steps, "warmup": 1}}
    config["recovery"] |= {"steps": recovery, "warmup": 1, "control": False}
    config["models"] = {"delta_net": config["models"]["delta_net"]}
    config["methods"] = {name: config["methods"][name] for name in methods}
    config["evaluation"]["suites"] = {"ppl": config["evaluation"]["suites"]["ppl"]}
    config["tables"] = {"by_ratio": config["tables"]["by_ratio"]}
    config["tables"]["by_ratio"] |= {
        "methods": [*methods], "ratios": [0.5], "columns": {"post": ["ppl"]}
    }  # fmt: skip
    config["figures"], config["benchmarks"] = {}, {}
    del config["analysis"]
    return config
