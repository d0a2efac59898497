"""The files that a run leaves for reporting, with invented numbers: the same ones every time."""

import random
from dataclasses import asdict, astuple
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from reproduction.analysis.rank import RankAnalysis
from reproduction.config import DecodingBenchmark, QualityTable, load_config
from reproduction.reporting.figures import draw
from reproduction.reporting.frame import (
    LOWER_IS_BETTER,
    make_frame,
    read_published,
    table_results,
)
from reproduction.reporting.jobs import result_records
from reproduction.reporting.verdict import PUBLISHED
from reproduction.running.paths import PROVENANCE
from statecut.arguments import width
from statecut.files import digest, write_json

ROOT = Path(__file__).parents[1]
DEMO = load_config(ROOT / "config" / "demo.yaml")
PAPERS_RUN = load_config(ROOT / "config" / "paper.yaml")
PRINTED = read_published(PUBLISHED / "values.csv")
VERSIONS = {"statecut": "0.1", "python": "3.11.2", "torch": "2.13.0", "triton": "3.7.1"}

# How much each method harms a model at half its channels, as a factor of its perplexity.
HARM = {"grad": 1.05, "drrqr": 1.08, "s_wanda": 1.3, "l1": 1.6, "rand": 2.0}
DRAWN = [random.Random(number).gauss(0, 0.01) for number in range(60)]


def evaluation_files(config, folder):
    """One file per evaluation of a run, as `reproduction.suites` writes them."""
    files = {}
    for variant, suite in config.evaluations():
        name = ".".join(map(str, [*astuple(variant), suite]))
        files[variant, suite] = folder / f"{name}.json"
        write_json(files[variant, suite], evaluation(config, variant, suite))
    return files


def evaluation(config, variant, suite):
    results, tasks = {}, {}
    for column, task in config.evaluation.suites[suite].tasks.items():
        data = {"name": task.task, "revision": "sha256:0"}
        tasks[column] = {"task": task.task, "documents": 100, "data": data}
        if task.not_attempted:
            results[column] = {"not_attempted": task.not_attempted}
            continue
        value = invented(variant, column, lower=task.metric in LOWER_IS_BETTER)
        draws = [value * (1 + error) for error in DRAWN]
        results[column] = {"value": value, "stderr": 0.01 * value, "draws": draws}
    return {
        "suite": suite,
        "protocol": config.evaluation.protocol,
        "model": digest(asdict(variant)),
        "device": "cpu",
        "versions": VERSIONS,
        "results": results,
        "tasks": tasks,
    }


def invented(variant, column, *, lower):
    """Worse the more is cut, by method; better again after refit and after recovery."""
    whole = random.Random(f"{variant.model} {column}").uniform(0.25, 0.6)
    ratio = 0.75 if isinstance(variant.ratio, str) else variant.ratio
    harm = 1 + (HARM.get(variant.method, 1.4) - 1) * (2 * ratio) ** 2
    harm = 1 + (harm - 1) / (1 + variant.refitted) / (4 if variant.recovered else 1)
    harm *= random.Random(f"{variant} {column}").uniform(0.99, 1.01)
    return 100 * whole * harm if lower else whole / harm


def measurement_files(config, folder):
    """One file per cell of a run's benchmarks, as `reproduction.benchmarking` writes them."""
    files = {}
    for cell in config.measurements():
        parts = [cell.benchmark, cell.subject, cell.ratio, cell.width, cell.mode]
        files[cell] = folder / f"{'.'.join(map(str, parts))}.json"
        write_json(files[cell], measurement(config, cell))
    return files


def measurement(config, cell):
    benchmark = config.benchmarks[cell.benchmark]
    draw = random.Random(str(cell))
    speed = 3e5 / (cell.width + 40) * draw.uniform(0.97, 1.03) * (1 + (cell.mode == "forward"))
    no_gpu = {"value": None, "stderr": None, "reason": "not measured: no GPU"}

    def measured(value):
        runs = {"median": 1.0, "lower": 0.9, "upper": 1.1, "repeats": 5, "warmup": 1}
        return {"value": value, "stderr": 0.01 * value, "runs": runs}

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
    }


def noise_of(variant):
    return np.random.default_rng(int(digest(asdict(variant))[:8], 16))


def analysis_files(config, folder):
    """One file per analysed variant: states whose singular values fall off, the faster the worse
    the method."""
    figures = config.figures.values()
    heads = tuple(dict.fromkeys((f.layer, f.head) for f in figures if f.kind == "spectrum"))
    tokens = max(f.tokens for f in figures if f.kind in ("spectrum", "utilization"))
    after = tokens - config.analysis.skip
    files = {}
    for variant in config.analyses():
        model, draw = config.models[variant.model], noise_of(variant)
        d = width(model.head_k_dim, variant.ratio)
        decay = 25 / HARM.get(variant.method, 1.0) ** 2 * draw.uniform(0.95, 1.05)
        shape = (model.num_hidden_layers, model.num_heads, tokens)
        used = decay * (1 - np.exp(-np.arange(1, tokens + 1) / 60)) * draw.lognormal(0, 0.1, shape)
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


def model_folder(model, folder):
    """A model of which only the filters are there, alike inside a head."""
    draw = np.random.default_rng(0)
    layers, heads, d = model.num_hidden_layers, model.num_heads, model.head_k_dim
    sharing = getattr(model, "conv_sharing", "none")
    stored = {"none": (heads, d), "head": (heads, 1), "all": (1, 1)}[sharing]
    about = {"model_type": "delta_net", "hidden_size": model.hidden_size, "num_heads": heads}
    if sharing != "none":
        about |= {"model_type": "delta_net_shared_conv", "conv_sharing": sharing}
    tensors = {}
    for layer in range(layers):
        for side in "qkv":
            alike = draw.normal(0, 0.3, (stored[0], 1, 1, 4))
            w = alike + draw.normal(0, 0.1, (*stored, 1, 4))
            name = f"model.layers.{layer}.attn.{side}_conv1d.weight"
            tensors[name] = w.reshape(-1, 1, 4).astype(np.float32)
    write_json(folder / "config.json", {**about, "num_hidden_layers": layers})
    save_file(tensors, folder / "model.safetensors")
    return folder


def figure_sources(config, name, folder):
    """What a figure is drawn of."""
    figure = config.figures[name]
    if figure.kind == "sweep":
        measured = measurement_files(config, folder / "measurements")
        return [measured[cell] for cell in config.measurements(figure.benchmark)]
    if figure.kind in ("quality", "state"):
        frames = frame_files(config, folder)
        return [frames[table] for table in figure.tables]
    if figure.kind == "filters":
        return [model_folder(config.models[figure.model], folder / figure.model)]
    analysed = analysis_files(config, folder / "analyses")
    return [analysed[variant] for variant in config.analyses(name)]


def in_print(config, table):
    """The paper's numbers of a table as if the run had measured them."""
    values = {printed.key: printed.value for printed in PRINTED if printed.table == table}
    known = {"protocol": config.evaluation.protocol, "source": "the paper", "reason": ""}
    return [
        result._replace(value=values[result.key], **known)
        for result in table_results(config, table, [])
        if result.key in values
    ]


def frame_files(config, folder):
    """A frame of every table."""
    evaluations = evaluation_files(config, folder / "evaluations")
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


def record(rule, seconds, gpus=()):
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


def curve_files(config, folder):
    """Loss curves of what is trained and recovered."""
    files, steps = {}, np.arange(1, 201)
    folder.mkdir()
    for variant in config.variants():
        trained = config.models[variant.model].source.kind == "pretrain" and variant.rft == "none"
        if variant.recovered or trained:
            ce = 3 + 4 * np.exp(-steps / 40) + 0.05 * noise_of(variant).normal(size=200)
            lines = (
                f"{s},{s * 1024},{c + variant.ratio:.6g}" for s, c in zip(steps, ce, strict=True)
            )
            files[variant] = folder / f"{digest(asdict(variant))[:12]}.csv"
            files[variant].write_text("\n".join(["step,tokens,ce", *lines, ""]))
    return files


def report_inputs(config, folder, *, drawn):
    """Everything that a report is written of, its figures really drawn or not."""
    frames = list(frame_files(config, folder).values())
    for path in sorted((folder / "evaluations").glob("*.json")):
        write_json(f"{path}{PROVENANCE}", record("evaluate", 20.0, ("NVIDIA H200",)))
    for part in ("figures", "selections"):
        (folder / part).mkdir()
    figures = [folder / "figures" / f"{name}.svg" for name in config.figures]
    for name, path in zip(config.figures, figures, strict=True):
        if drawn:
            draw(config, name, figure_sources(config, name, folder), [path])
        else:
            path.write_text('<svg width="9pt"><path id="m" d="M 0 0"/></svg>')
    steps = {}
    for variant in config.variants():
        if variant.pruned:
            path = folder / "selections" / f"{digest(asdict(variant))[:12]}.json"
            write_json(path, {})
            steps[variant] = [path]
    return {
        "frames": frames,
        "figures": figures,
        "curves": curve_files(config, folder / "curves"),
        "records": result_records(folder).values(),
        "steps": steps,
    }
