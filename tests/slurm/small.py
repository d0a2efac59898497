"""A run of some twenty jobs, cut out of the demo: one model, a few steps, one table."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def small(run: str, *, steps: int = 3) -> dict:
    """The configuration, as it would be read from a file."""
    text = (ROOT / "config" / "demo.yaml").read_text().replace("results/demo/", f"results/{run}/")
    config = yaml.safe_load(text)
    slices = {"held_out": 32, "calibration": 8, "recovery": 32, "pretraining": 8 * steps}
    config["run"] = run
    config["corpora"]["documentation"]["slices"] = slices
    config["recipes"]["demo"] |= {"steps": steps, "warmup": 1}
    config["recovery"] |= {"steps": 2, "warmup": 1, "control": False}
    config["calibration"] |= {"sequences": 4, "rows": 64}
    config["models"] = {"delta_net": config["models"]["delta_net"]}
    config["methods"] = {name: config["methods"][name] for name in ("l1", "drrqr")}
    suites = config["evaluation"]["suites"]
    config["evaluation"]["suites"] = {"ppl": suites["ppl"]}
    config["tables"] = {"by_ratio": config["tables"]["by_ratio"]}
    config["tables"]["by_ratio"] |= {
        "methods": ["l1", "drrqr"], "ratios": [0.5], "columns": {"post": ["ppl"]}
    }  # fmt: skip
    config["figures"], config["benchmarks"] = {}, {}
    del config["analysis"]
    return config
