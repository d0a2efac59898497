"""The files that a run leaves for reporting, with invented numbers: the same ones every time."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

from keycut.artefact import digest, write_json
from keycut.config import Config, DecodingBenchmark, Measurement, Variant
from keycut.reporting.grid import LOWER_IS_BETTER

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "workflow" / "templates"
VERSIONS = {"keycut": "0.1", "python": "3.11.2", "torch": "2.13.0", "triton": "3.7.1"}

# How much each method harms a model at half its channels, as a factor of its perplexity.
HARM = {"grad": 1.05, "drrqr": 1.08, "s_wanda": 1.3, "l1": 1.6, "rand": 2.0}


def evaluation_files(config: Config, folder: Path) -> dict[tuple[Variant, str], Path]:
    """One file per evaluation of a run, as `keycut.evaluation` writes them."""
    files = {}
    for variant, suite in config.evaluations():
        parts = [variant.model, variant.method, variant.target, variant.ratio, variant.seed]
        name = ".".join(map(str, [*parts, variant.rft, suite]))
        files[variant, suite] = folder / f"{name}.json"
        write_json(files[variant, suite], evaluation(config, variant, suite))
    return files


def evaluation(config: Config, variant: Variant, suite: str) -> dict:
    spec = config.evaluation.suites[suite]
    results = {}
    for column, task in spec.tasks.items():
        if task.not_attempted:
            results[column] = {"not_attempted": task.not_attempted}
            continue
        value = invented(variant, column, lower=task.metric in LOWER_IS_BETTER)
        results[column] = {
            "task": task.task,
            "metric": task.metric,
            "value": value,
            "stderr": 0.01 * value,
        }
    return {
        "suite": suite,
        "protocol": config.evaluation.protocol,
        "window": spec.window,
        "batch": spec.batch,
        "model": digest(asdict(variant)),
        "tokenizer": digest("tokenizer"),
        "device": "cpu",
        "dtype": "float32",
        "versions": VERSIONS,
        "code": digest("code"),
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "results": results,
        "tasks": {
            column: {"task": task.task, "version": task.version, "documents": 100, "shots": 0}
            for column, task in spec.tasks.items()
        },
    }


def invented(variant: Variant, column: str, *, lower: bool) -> float:
    """Worse the more is cut, by method; better again after recovery."""
    draw = random.Random(f"{variant} {column}")
    whole = random.Random(f"{variant.model} {column}").uniform(0.25, 0.6)
    harm = 1 + (HARM.get(variant.method, 1.4) - 1) * (2 * variant.ratio) ** 2
    if variant.rft == "post":
        harm = 1 + (harm - 1) / 4
    harm *= draw.uniform(0.99, 1.01)
    return 100 * whole * harm if lower else whole / harm


def measurement_files(config: Config, folder: Path) -> dict[Measurement, Path]:
    """One file per cell of a run's benchmarks, as `keycut.benchmarking` writes them."""
    files = {}
    for cell in config.measurements():
        parts = [cell.benchmark, cell.subject, cell.ratio, cell.width, cell.does]
        files[cell] = folder / f"{'.'.join(map(str, parts))}.json"
        write_json(files[cell], measurement(config, cell))
    return files


def measurement(config: Config, cell: Measurement) -> dict:
    benchmark = config.benchmarks[cell.benchmark]
    draw = random.Random(str(cell))
    speed = 3e5 / (cell.width + 40) * draw.uniform(0.97, 1.03) * (1 + (cell.does == "forward"))
    no_gpu = {"value": None, "stderr": None, "reason": "not measured: no GPU"}

    def measured(value: float) -> dict:
        return {"value": value, "stderr": 0.01 * value, "reason": ""}

    if isinstance(benchmark, DecodingBenchmark):
        results = {f"tokens_per_s_{b}": measured(speed * b**0.7) for b in benchmark.batches}
        results |= {"state_mib": measured(cell.width / 64), "largest_batch": no_gpu}
    else:
        results = {"tokens_per_s": measured(speed), "peak_memory_gib": no_gpu}
    return {
        "cell": asdict(cell),
        "results": results,
        "padded": None,
        "settings": benchmark.model_dump(mode="json"),
        "device": "cpu",
        "gpu": None,
        "backend": "plain",
        "versions": VERSIONS,
        "seconds": 1.5,
    }
