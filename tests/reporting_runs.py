"""The files that a run leaves for reporting, with invented numbers: the same ones every time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from reproduction.analysis.rank import RankAnalysis
from reproduction.config import (
    Config,
    DecodingBenchmark,
    Measurement,
    QualityTable,
    Variant,
    load_config,
)
from reproduction.config.evaluation import FRACTIONS
from reproduction.reporting.figures import draw
from reproduction.reporting.frame import (
    LOWER_IS_BETTER,
    PAPER,
    Key,
    Printed,
    Result,
    from_frame,
    make_frame,
    read_published,
    table_frame,
    variant_key,
)
from reproduction.reporting.jobs import result_records
from reproduction.reporting.verdict import make_verdict
from reproduction.running.paths import PROVENANCE
from statecut.arguments import width
from statecut.files import canonical_json, digest, write_json

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "workflow" / "templates"
PUBLISHED = ROOT / "config" / "published"
DEMO = load_config(ROOT / "config" / "demo.yaml")
PAPERS_RUN = load_config(ROOT / "config" / "paper.yaml")
PRINTED = read_published(PUBLISHED / "values.csv")
VERSIONS = {"statecut": "0.1", "python": "3.11.2", "torch": "2.13.0", "triton": "3.7.1"}

# How much each method harms a model at half its channels, as a factor of its perplexity.
DRAWN = [random.Random(number).gauss(0, 0.01) for number in range(60)]
HARM = {"grad": 1.05, "drrqr": 1.08, "s_wanda": 1.3, "l1": 1.6, "rand": 2.0}


def evaluation_files(
    config: Config, folder: Path, near: Mapping[Key, float] | None = None
) -> dict[tuple[Variant, str], Path]:
    """One file per evaluation of a run, as `reproduction.suites` writes them.

    Numbers are invented, or a little off those that are given.
    """
    files = {}
    for variant, suite in config.evaluations():
        name = ".".join(map(str, [*astuple(variant), suite]))
        files[variant, suite] = folder / f"{name}.json"
        write_json(files[variant, suite], evaluation(config, variant, suite, near or {}))
    return files


def evaluation(config: Config, variant: Variant, suite: str, near: Mapping[Key, float]) -> dict:
    spec = config.evaluation.suites[suite]
    results = {}
    for column, task in spec.tasks.items():
        if task.not_attempted:
            results[column] = {"not_attempted": task.not_attempted}
            continue
        value = invented(variant, column, lower=task.metric in LOWER_IS_BETTER)
        if printed := near.get(variant_key(config, variant, column)):
            off = random.Random(f"{variant} {column} off").gauss(1, 0.02)
            value = printed * off / (100 if task.metric in FRACTIONS else 1)
        results[column] = {
            "task": task.task,
            "metric": task.metric,
            "value": value,
            "stderr": 0.01 * value,
            "draws": [value * (1 + error) for error in DRAWN],
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
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "results": results,
        "tasks": {
            column: {
                "task": task.task,
                "version": task.version,
                "documents": 100,
                "shots": 0,
                "data": {"name": task.task, "revision": "sha256:0"},
            }
            for column, task in spec.tasks.items()
        },
    }


def invented(variant: Variant, column: str, *, lower: bool) -> float:
    """Worse the more is cut, by method; better again after refit and after recovery."""
    draw = random.Random(f"{variant} {column}")
    whole = random.Random(f"{variant.model} {column}").uniform(0.25, 0.6)
    harm = 1 + (HARM.get(variant.method, 1.4) - 1) * (2 * variant.ratio) ** 2
    harm = 1 + (harm - 1) / (1 + variant.refitted) / (4 if variant.recovered else 1)
    harm *= draw.uniform(0.99, 1.01)
    return 100 * whole * harm if lower else whole / harm


def measurement_files(config: Config, folder: Path) -> dict[Measurement, Path]:
    """One file per cell of a run's benchmarks, as `reproduction.benchmarking` writes them."""
    files = {}
    for cell in config.measurements():
        parts = [cell.benchmark, cell.subject, cell.ratio, cell.width, cell.mode]
        files[cell] = folder / f"{'.'.join(map(str, parts))}.json"
        write_json(files[cell], measurement(config, cell))
    return files


def measurement(config: Config, cell: Measurement) -> dict:
    benchmark = config.benchmarks[cell.benchmark]
    draw = random.Random(str(cell))
    speed = 3e5 / (cell.width + 40) * draw.uniform(0.97, 1.03) * (1 + (cell.mode == "forward"))
    no_gpu = {"value": None, "stderr": None, "reason": "not measured: no GPU"}
    no_gpu |= {"note": "", "runs": None}

    def measured(value: float) -> dict:
        runs = {"median": 1.0, "lower": 0.9, "upper": 1.1, "repeats": 5, "warmup": 1}
        error = 0.01 * value
        return {"value": value, "stderr": error, "reason": "", "note": "", "runs": runs}

    if isinstance(benchmark, DecodingBenchmark):
        results = {f"tokens_per_s_{b}": measured(speed * b**0.7) for b in benchmark.batches}
        results |= {f"graph_{name}": no_gpu for name in list(results)}
        results |= {"state_mib": measured(cell.width / 64), "largest_batch": no_gpu}
    else:
        results = {"tokens_per_s": measured(speed), "peak_memory_gib": no_gpu}
    return {
        "cell": asdict(cell),
        "results": results,
        "timed": "a pass",
        "settings": benchmark.model_dump(mode="json"),
        "machine": {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "versions": VERSIONS},
        "tuning": {},
        "seconds": 1.5,
    }


def analysis_files(config: Config, folder: Path) -> dict[Variant, Path]:
    """One file per analysed variant: states whose singular values fall off, the faster the worse
    the method."""
    assert config.analysis
    figures = config.figures.values()
    heads = tuple(dict.fromkeys((f.layer, f.head) for f in figures if f.kind == "spectrum"))
    files = {}
    for variant in config.analyses():
        model = config.models[variant.model]
        tokens = max(f.tokens for f in figures if f.kind in ("spectrum", "utilization"))
        d = width(model.head_k_dim, variant.ratio)
        draw = np.random.default_rng(int(digest(asdict(variant))[:8], 16))
        decay = 25 / HARM.get(variant.method, 1.0) ** 2 * draw.uniform(0.95, 1.05)
        t = np.arange(1, tokens + 1)
        shape = (model.num_hidden_layers, model.num_heads, tokens)
        used = decay * (1 - np.exp(-t / 60)) * draw.lognormal(0, 0.1, shape)
        after = tokens - config.analysis.skip
        sigma = 8 * np.exp(-np.arange(d) / decay * 2) * draw.lognormal(0, 0.15, (1, after, d))
        files[variant] = folder / f"{digest(asdict(variant))[:12]}.npz"
        RankAnalysis(
            layers=tuple(range(model.num_hidden_layers)),
            capacity=d,
            skip=config.analysis.skip,
            effective_rank=np.clip(used, 1, d).astype(np.float32),
            heads=heads,
            spectra=-np.sort(-sigma.repeat(len(heads), 0)).astype(np.float32),
            provenance={},
        ).save(files[variant], force=True)
    return files


def model_folder(config: Config, name: str, folder: Path) -> Path:
    """A model of which only the filters are there, alike inside a head."""
    model = config.models[name]
    draw = np.random.default_rng(0)
    layers, heads, d = model.num_hidden_layers, model.num_heads, model.head_k_dim
    kind, sharing = "delta_net", getattr(model, "conv_sharing", "none")
    stored = {"none": (heads, d), "head": (heads, 1), "all": (1, 1)}[sharing]
    about = {"model_type": kind, "hidden_size": model.hidden_size, "num_heads": heads}
    if sharing != "none":
        about |= {"model_type": "delta_net_shared_conv", "conv_sharing": sharing}
    tensors = {}
    for layer in range(layers):
        for side in "qkv":
            alike = draw.normal(0, 0.3, (stored[0], 1, 1, 4))
            w = alike + draw.normal(0, 0.1, (*stored, 1, 4))
            w = w.reshape(-1, 1, 4).astype(np.float32)
            tensors[f"model.layers.{layer}.attn.{side}_conv1d.weight"] = w
    write_json(folder / "config.json", {**about, "num_hidden_layers": layers})
    save_file(tensors, folder / "model.safetensors")
    return folder


def figure_sources(config: Config, name: str, folder: Path) -> list[Path]:
    """What a figure is drawn of."""
    figure = config.figures[name]
    if figure.kind == "sweep":
        measured = measurement_files(config, folder / "measurements")
        return [measured[cell] for cell in config.measurements(figure.benchmark)]
    if figure.kind in ("quality", "state"):
        frames = frame_files(config, folder)
        return [frames[table] for table in figure.tables]
    if figure.kind == "filters":
        return [model_folder(config, figure.model, folder / figure.model)]
    analysed = analysis_files(config, folder / "analyses")
    return [analysed[variant] for variant in config.analyses(name)]


def in_print(config: Config, table: str, published: list[Printed]) -> list[Result]:
    """The paper's numbers of a table as if the run had measured them."""
    values = {printed.key: printed.value for printed in published if printed.table == table}
    protocol, source = config.evaluation.protocol, f"{PAPER}, {table}"
    return [
        result._replace(value=values[result.key], protocol=protocol, source=source, reason="")
        for result in from_frame(table_frame(config, table, []))
        if result.key in values
    ]


def frame_files(config: Config, folder: Path) -> dict[str, Path]:
    """A frame of every table, near the paper's numbers where they compare."""
    near = None
    if config.evaluation.protocol == "paper":
        near = {printed.key: printed.value for printed in read_published(PUBLISHED / "values.csv")}
    evaluations = evaluation_files(config, folder / "evaluations", near)
    measurements = measurement_files(config, folder / "measurements")
    frames = {}
    for name, table in config.tables.items():
        if isinstance(table, QualityTable):
            sources = [evaluations[evaluation] for evaluation in config.evaluations(name)]
        else:
            sources = [measurements[cell] for cell in config.timings(name)]
        frames[name] = folder / "frames" / f"{name}.parquet"
        make_frame(config, name, sources, frames[name])
    return frames


def record(rule: str, seconds: float, gpus: tuple[str, ...] = ()) -> dict:
    """What a job leaves beside its output."""
    return {
        "rule": rule,
        "wildcards": {},
        "inputs": [],
        "commit": "0123456789ab",
        "versions": VERSIONS,
        "machine": "node1",
        "gpus": list(gpus),
        "started": "2026-01-31T23:00:00Z",
        "seconds": seconds,
    }


def curve_files(config: Config, folder: Path) -> dict[Variant, Path]:
    """Loss curves of what is trained and recovered."""
    files = {}
    for variant in config.variants():
        model = config.models[variant.model]
        trained = variant.rft == "none" and model.source.kind == "pretrain"
        if not variant.recovered and not trained:
            continue
        draw = np.random.default_rng(int(digest(asdict(variant))[:8], 16))
        steps = np.arange(1, 201)
        ce = 3 + 4 * np.exp(-steps / 40) + 0.05 * draw.normal(size=200) + variant.ratio
        lines = [
            f"{s},{s * 1024},{c:.6g},{c:.6g},,0.001,1.0" for s, c in zip(steps, ce, strict=True)
        ]
        path = folder / f"{digest(asdict(variant))[:12]}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["step,tokens,loss,ce,kd,lr,grad_norm", *lines, ""]))
        files[variant] = path
    return files


def report_inputs(config: Config, folder: Path, *, drawn: bool) -> dict:
    """Everything that a report is written of, its figures really drawn or not."""
    frames = frame_files(config, folder)
    for path in sorted((folder / "evaluations").glob("*.json")):
        write_json(f"{path}{PROVENANCE}", record("evaluate", 20.0, ("NVIDIA H200",)))
    make_verdict(
        config,
        list(frames.values()),
        folder / "verdict",
        PUBLISHED,
        ROOT / "config" / "claims.yaml",
    )
    figures = []
    for name in config.figures:
        figures.append(folder / "figures" / f"{name}.svg")
        if drawn:
            draw(config, name, figure_sources(config, name, folder), figures[-1:])
        else:
            figures[-1].parent.mkdir(exist_ok=True)
            figures[-1].write_text('<svg width="9pt"><path id="m" d="M 0 0"/></svg>')
    timings = {}
    for rule, seconds in (("pretrain", 3000.0), ("evaluate", 25.5)):
        path = folder / "timings" / f"{rule}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"s\th:m:s\tmax_rss\n{seconds}\t0:00:01\t2048.0\n")
        timings[rule] = [path]
    steps = {}
    for variant in config.variants():
        if variant.pruned:
            path = folder / "selections" / f"{digest(asdict(variant))[:12]}.safetensors"
            about = {"method": variant.method, "target": variant.target, "width": 16}
            about |= {"full_width": 32, "calibration": {"seed": variant.seed, "sequences": 16}}
            path.parent.mkdir(exist_ok=True)
            save_file({"kept": np.zeros(1)}, path, {"about": canonical_json(about)})
            steps[variant] = [path]
    return {
        "frames": list(frames.values()),
        "verdict": folder / "verdict",
        "figures": figures,
        "curves": curve_files(config, folder / "curves"),
        "timings": timings,
        "records": result_records(folder).values(),
        "steps": steps,
        "templates": TEMPLATES,
    }
