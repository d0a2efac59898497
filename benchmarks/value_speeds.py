"""Speeds by d_k and d_v, for `values.py --speed`: models of a configuration with random weights.

What is timed, and in which batches, is said by the configuration's benchmarks `model` and
`decoding`, of whose batches the largest one is taken. Each part of a row is measured in a process
of its own with nothing else running; only imports of the next ones come before, of as many as there
are cores.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hybrid
import torch
from torch import Tensor

from reproduction.benchmarking import decoding
from reproduction.benchmarking.cell import readings
from reproduction.benchmarking.passes import capture_graph, random_model
from reproduction.benchmarking.record import Reading
from reproduction.benchmarking.timing import memory_for, time_runs
from reproduction.config import Config, DecodingBenchmark, Measurement, ModelBenchmark
from reproduction.config.models import Model
from statecut.errors import InputError
from statecut.preflight import machine, used_dtype
from statecut.process import NotMeasured, Worker, in_one_line, run_work

LIMIT_S, TUNING_LIMIT_S = 300.0, 480.0
PARTS = ("layer", "forward", "training", "decoding")  # the last one needs all memory for itself
CONTEXT = 512  # tokens before the one that a hybrid decodes: its softmax layers keep them
Split = tuple[int, int]
Row = dict[str, Any]


def start_worker() -> Worker:
    """A process that finds this module by its name."""
    folder = str(Path(__file__).parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *paths])
    return Worker("reproduction.benchmarking.decoding", "fla.layers", "fla.models")


def with_value_width(spec: Model, value_width: int) -> Model:
    """The model with another d_v; d_k is an argument of `random_model`."""
    expand_v = spec.expand_v * value_width / spec.head_v_dim  # type: ignore[attr-defined]
    return spec.model_copy(update={"expand_v": expand_v})


def work(
    part: str, spec: Model, width: int, config: Config, device: str, seconds: float
) -> tuple[Callable[..., Iterator[Any]], tuple[Any, ...]]:
    """The generator that measures a part of a row, and its arguments."""
    passes, decodes = benchmarks(config)
    if part == "layer":
        return layer_readings, (passes, spec, width, device, seconds)
    if part == "decoding" and is_hybrid(spec):
        return hybrid_decoding, (decodes, spec, width, device, seconds)
    benchmark = decodes if part == "decoding" else passes
    cell = Measurement(part, "", spec.kernel, 0.0, width, part)
    return readings, (benchmark, spec, cell, device, seconds)


def benchmarks(config: Config) -> tuple[ModelBenchmark, DecodingBenchmark]:
    passes, decodes = (config.benchmarks.get(name) for name in ("model", "decoding"))
    if not (isinstance(passes, ModelBenchmark) and isinstance(decodes, DecodingBenchmark)):
        raise InputError(f"the configuration {config.run} has no benchmarks `model` and `decoding`")
    return (
        passes.model_copy(update={"graph": True}),
        decodes.model_copy(update={"batches": (max(decodes.batches),)}),
    )


def is_hybrid(spec: Model) -> bool:
    return len(spec.mixer_shape.layers) < spec.num_hidden_layers


def layer_readings(
    benchmark: ModelBenchmark, spec: Model, width: int, device: str, seconds: float
) -> Iterator[tuple[str, Any]]:
    """The forward pass of the model's first layer with a delta rule, alone."""
    yield "machine", machine(device)
    name = spec.adapter.mixer.format(layer=spec.mixer_shape.layers[0]).rstrip(".")
    layer = random_model(spec, width, device).eval().get_submodule(name)
    gc.collect()
    size = (benchmark.batch, benchmark.length, spec.hidden_size)
    x = torch.randn(size, device=device, dtype=used_dtype(device))

    @torch.inference_mode()
    def run() -> Tensor:
        out = layer(x)
        return out if isinstance(out, Tensor) else out[0]

    def rate(run: Callable[[], Tensor]) -> Reading:
        runs = time_runs(run, device, warmup=benchmark.warmup, repeats=benchmark.repeats,
                         seconds=seconds)  # fmt: skip
        return runs.rate(benchmark.batch * benchmark.length)

    with memory_for(benchmark.batch):
        yield "tokens_per_s", rate(run)
        yield (
            "graph_tokens_per_s",
            rate(capture_graph(run)) if device == "cuda" else Reading.missing("no GPU"),
        )


def hybrid_decoding(
    benchmark: DecodingBenchmark, spec: Model, width: int, device: str, seconds: float
) -> Iterator[tuple[str, Any]]:
    """Greedy decoding as benchmarks/hybrid.py times it: one token at the same place again and
    again, as kernels are launched by Python, and as a graph; and how many sequences fit."""
    yield "machine", machine(device)
    options = argparse.Namespace(each=seconds, tokens=benchmark.tokens)
    bench = hybrid.Bench(options, device)
    model = random_model(spec, width, device).eval()
    prompt = hybrid.Prompt(model, CONTEXT)
    (batch,) = benchmark.batches

    def read(measure: Callable[..., Row], *arguments: Any, **options: Any) -> tuple[Reading, Row]:
        """One figure that cannot be measured does not end the others."""
        try:
            row = measure(bench, model, *arguments, **options)
        except (RuntimeError, NotMeasured) as error:
            return Reading.missing(in_one_line(error)), {}
        speed = Reading(row["tokens_per_s"]) if "tokens_per_s" in row else None
        return speed or Reading.missing(row["error"]), row

    for way, metric in (("step", "tokens_per_s"), ("graph", "graph_tokens_per_s")):
        if way == "graph" and device == "cpu":
            yield f"{metric}_{batch}", Reading.missing("no GPU")
        else:
            yield f"{metric}_{batch}", read(hybrid.step_speed, prompt, batch, [], way=way)[0]
    del prompt
    hybrid.free()
    speed, row = read(hybrid.most, CONTEXT)
    note = f"behind {CONTEXT} tokens"
    if not row:
        yield "largest_batch", speed
        return
    yield "largest_batch", Reading(row["sequences"], note=f"{note}, limited by {row['limited_by']}")
    yield "tokens_per_s_largest", replace(speed, note=f"batch {row['batch']:,}, {note}")


def measure_rows(
    cells: list[tuple[str, Split]], config: Config, device: str, seconds: float
) -> Iterator[Row]:
    """A row for each model and split, one after the other."""
    own_process = device == "cuda"
    ahead = max(1, (os.cpu_count() or 1) // len(PARTS)) if own_process else 1
    for start in range(0, len(cells), ahead):
        rows = cells[start : start + ahead]
        workers: list[Worker | None] = [
            start_worker() if own_process else None for _ in rows for _ in PARTS
        ]
        try:
            for worker in filter(None, workers):
                worker.wait()
            for number, (name, split) in enumerate(rows):
                own = workers[number * len(PARTS) : (number + 1) * len(PARTS)]
                yield measure_row(name, split, config, device, seconds, own)
        finally:
            for worker in filter(None, workers):
                worker.close()


def measure_row(
    name: str,
    split: Split,
    config: Config,
    device: str,
    seconds: float,
    workers: list[Worker | None],
) -> Row:
    """All parts, each in its worker, one after the other."""
    spec, (width, value_width) = config.models[name], split
    narrow = with_value_width(spec, value_width)
    shape = replace(spec.mixer_shape, width=width, value_width=value_width)
    model = random_model(narrow, width, "meta")
    row: Row = {
        "model": name, "d_k": width, "d_v": value_width, "state_bytes": shape.state_bytes(),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "speeds": {}, "seconds": {},
        "settings": {b.kind: b.model_dump(mode="json") for b in benchmarks(config)},
    }  # fmt: skip
    for part, worker in zip(PARTS, workers, strict=True):
        function, arguments = work(part, narrow, width, config, device, seconds)
        outcome = run_work(
            function, *arguments, limit_s=LIMIT_S, own_process=worker is not None, worker=worker
        )
        values = dict(outcome.values)
        row["machine"] = values.pop("machine", None) or row.get("machine")
        if outcome.reason:
            values["ended"] = Reading.missing(outcome.reason)
        row["speeds"][part] = {metric: asdict(value) for metric, value in values.items()}
        row["seconds"][part] = round(outcome.seconds, 1)
    return row


def with_ratios(row: Row, whole: Row) -> Row:
    """Each figure over that of the unpruned shape, where both have one."""
    ratios: dict[str, Any] = {key: row[key] / whole[key] for key in ("state_bytes", "parameters")}
    for part, metrics in row["speeds"].items():
        ratios[part] = {
            metric: reading["value"] / whole["speeds"][part][metric]["value"]
            for metric, reading in metrics.items()
            if reading["value"] and whole["speeds"][part].get(metric, {}).get("value")
        }
    return {**row, "ratios": ratios}


def tune(cells: list[tuple[str, Split]], config: Config, jobs: int) -> Iterator[str]:
    """Run each shape once with few layers, many processes side by side: that is compiling on the
    CPU. Training covers the forward pass and the layer; a hybrid's decoding compiles little."""
    passes, decodes = benchmarks(config)
    passes = passes.model_copy(update={"warmup": 1, "repeats": 1})

    def once(name: str, split: Split, mode: str) -> str:
        spec, width = with_value_width(config.models[name], split[1]), split[0]
        layers = getattr(spec, "softmax_every", None) or 1
        spec = spec.model_copy(update={"num_hidden_layers": layers})
        cell = Measurement(mode, "", spec.kernel, 0.0, width, mode)
        if mode == "decoding":
            outcome = start_worker().run(decoding.tune, decodes, spec, cell, limit_s=TUNING_LIMIT_S)
        else:  # transformers' models keep the logits of a batch: not of this many at once
            batch = max(1, passes.batch // 8) if is_hybrid(spec) else passes.batch
            few = passes.model_copy(update={"batch": batch})
            outcome = start_worker().run(
                readings, few, spec, cell, "cuda", 0.0, limit_s=TUNING_LIMIT_S
            )
        reason = outcome.reason and f", {outcome.reason}"
        return f"tuned {name} {width}x{split[1]} {mode}: {outcome.seconds:.0f} s{reason}"

    work = [(name, split, "training") for name, split in cells]
    work += [
        (name, split, "decoding") for name, split in cells if not is_hybrid(config.models[name])
    ]
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(once, *arguments) for arguments in work]):
            yield future.result()


def figures(row: Row) -> Iterator[tuple[str, Row, float | None]]:
    """What the table shows of a row: a title, the reading, that of a CUDA graph where it has one,
    and its ratio, which is one of like with like."""
    for part in PARTS:
        metrics = row["speeds"][part]
        for name in metrics:
            if name.startswith("tokens_per_s") or name == "largest_batch":
                graph = f"graph_{name}"
                metric = graph if metrics.get(graph, {}).get("value") else name
                yield title(part, name), metrics[metric], row["ratios"][part].get(metric)


def title(part: str, metric: str) -> str:
    if metric == "largest_batch":
        return "largest batch"
    batch = metric.removeprefix("tokens_per_s").strip("_")
    at = {"": "", "largest": ", largest batch"}.get(batch, f", batch {batch}")
    return part + at


def table(rows: list[Row]) -> list[str]:
    """Markdown: tokens/s and sequences of an unpruned shape, and how many times as many of each
    split."""
    titles = list(dict.fromkeys(title for row in rows for title, _, _ in figures(row)))
    head = ["model", "d_k x d_v", "state", "parameters", *titles]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        whole = row["ratios"]["state_bytes"] == 1
        cells = {
            title: "-" if reading["value"] is None
            else f"{reading['value']:,.0f}" if whole or ratio is None
            else f"{ratio:.2f}"
            for title, reading, ratio in figures(row)
        }  # fmt: skip
        parameters = f"{row['parameters']:,}" if whole else f"{row['ratios']['parameters']:.2f}"
        columns = [
            row["model"], f"{row['d_k']} x {row['d_v']}", f"{row['ratios']['state_bytes']:.3f}",
            parameters, *(cells.get(title, "-") for title in titles),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    return lines
