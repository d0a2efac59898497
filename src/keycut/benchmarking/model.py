"""Whole models with random weights: only their shapes count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from keycut.benchmarking.layers import SEED
from keycut.benchmarking.machine import default_device, machine, timed_dtype
from keycut.benchmarking.process import NotMeasured
from keycut.benchmarking.record import Found
from keycut.benchmarking.timing import memory_for, peak_memory, timed
from keycut.config import Measurement, Model, ModelBenchmark
from keycut.models import create
from keycut.models.architectures import architecture

WORDS = {
    "forward": "forward pass of the model with the logits of all positions, without "
    "gradients or cache; graph_ figures replay it as one CUDA graph, without Python between the "
    "kernels",
    "training": "forward and backward pass of the model with its loss, gradients of all "
    "weights, without optimizer or recomputation",
}


def measure(
    benchmark: ModelBenchmark,
    spec: Model,
    cell: Measurement,
    device: str | None,
    seconds: float | None,
) -> Iterator[tuple[str, Any]]:
    """The machine, then the figures of one cell, each by its name."""
    device = device or default_device()
    yield "machine", machine(device)
    with memory_for(benchmark.batch):
        model = random_model(spec, cell.width, device)
        run = model_run(model, benchmark, cell.trains, device)
        runs = timed(
            run, device, warmup=benchmark.warmup, repeats=benchmark.repeats, seconds=seconds
        )
        yield "tokens_per_s", runs.rate(benchmark.batch * benchmark.length)
        yield "peak_memory_gib", peak_memory(run, device)
        if benchmark.graphs(cell.does):
            yield "graph_tokens_per_s", _graph_speed(run, benchmark, device, seconds)


def _graph_speed(
    run: Callable[[], torch.Tensor], benchmark: ModelBenchmark, device: str, seconds: float | None
) -> Found:
    if device == "cpu":
        return Found.missing("no GPU")
    runs = timed(
        graphed(run), device, warmup=benchmark.warmup, repeats=benchmark.repeats, seconds=seconds
    )
    return runs.rate(benchmark.batch * benchmark.length)


@torch.inference_mode()
def graphed(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A pass as one graph of kernels, whose result is that of the pass, but for rounding."""
    expected = run()[:1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    apart = relative(replay()[:1], expected)
    if not apart < 0.1:
        raise NotMeasured(f"the graph's result is {apart:.2g} from the right one")
    return replay


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def random_model(spec: Model, width: int, device: str) -> Any:
    """The model with d_k = width, made where it will run."""
    config = spec.fla_config()
    with torch.device(device):
        resized = architecture(config).resized(config, width)
        return create(resized, seed=SEED, dtype=timed_dtype(device))


def random_tokens(vocabulary: int, *shape: int, device: str) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, device=device)


def model_run(
    model: Any, benchmark: ModelBenchmark, trains: bool, device: str
) -> Callable[[], Any]:
    """One pass of the model over a batch."""
    ids = random_tokens(model.config.vocab_size, benchmark.batch, benchmark.length, device=device)
    if not trains:
        model.eval()
        return torch.inference_mode()(lambda: model(input_ids=ids, use_cache=False).logits)
    model.train()

    def train() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return train
