"""Forward and training passes of one layer or of a whole model: their speed and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarking.record import Reading
from reproduction.benchmarking.timing import Clock, memory_for, peak_bytes
from reproduction.config import Measurement, MixerBenchmark, Model, ModelBenchmark, cut_shape
from statecut.models.architectures import architecture
from statecut.models.checkpoint import create
from statecut.models.shapes import Shape
from statecut.preflight import random_layer, relative_error, used_dtype
from statecut.process import NotMeasured

PassBenchmark = MixerBenchmark | ModelBenchmark
GIB = 2**30


def readings(
    benchmark: PassBenchmark, spec: Model | None, cell: Measurement, device: str, clock: Clock
) -> Iterator[tuple[str, Reading]]:
    """The figures of one cell, each by its name; `spec` is of a model, None for a layer."""
    tokens = benchmark.batch * benchmark.length
    with memory_for(benchmark.batch):
        if isinstance(benchmark, MixerBenchmark):
            run = layer_pass(benchmark, cell, device)
        else:
            assert spec is not None
            run = model_pass(benchmark, cut_model(spec, cell, device), cell.trains)
        yield "tokens_per_s", clock(run).rate(tokens)
        if device == "cuda":
            yield "peak_memory_gib", Reading(peak_bytes(run) / GIB)
            if isinstance(benchmark, ModelBenchmark) and benchmark.graphs(cell.mode):
                yield "graph_tokens_per_s", clock(capture_graph(run)).rate(tokens)


def cut_model(spec: Model, cell: Measurement, device: str) -> Any:
    """The model of a cell, with random weights."""
    return random_model(spec, cell.width, device, cut_shape(spec, cell.ratio).value_width)


def random_model(spec: Model, width: int, device: str, value_width: int | None = None) -> Any:
    """The model with these widths, made where it will run."""
    config = spec.fla_config()
    with torch.device(device):
        resized = architecture(config).resized(config, width, value_width)
        return create(resized, seed=0, dtype=used_dtype(device))


def random_tokens(model: Any, *shape: int) -> Tensor:
    return torch.randint(0, model.config.vocab_size, shape, device=model.device)


def layer_pass(benchmark: MixerBenchmark, cell: Measurement, device: str) -> Callable[[], Tensor]:
    """One pass of the layer over a batch."""
    heads, hidden_size = benchmark.num_heads, benchmark.hidden_size
    shape = Shape(cell.kernel, heads, cell.width, heads, benchmark.head_v_dim)
    use_gate = benchmark.mixers[cell.subject].use_gate
    layer = random_layer(shape, device, hidden_size=hidden_size, use_gate=use_gate)
    size = (benchmark.batch, benchmark.length, hidden_size)
    x = torch.randn(size, device=device, dtype=used_dtype(device))
    if not cell.trains:
        layer.eval()
        return torch.inference_mode()(lambda: layer(x)[0])
    upstream = torch.randn_like(x)
    x.requires_grad_()

    def train() -> Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(x)[0]
        out.backward(upstream)
        return out

    return train


def model_pass(benchmark: ModelBenchmark, model: Any, trains: bool) -> Callable[[], Any]:
    """One pass of the model over a batch."""
    ids = random_tokens(model, benchmark.batch, benchmark.length)
    model.train(trains)
    if not trains:
        return torch.inference_mode()(lambda: model(input_ids=ids, use_cache=False).logits)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return train


@torch.inference_mode()
def capture_graph(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A pass as one graph of kernels, whose result is that of the pass, but for rounding."""
    expected = run()[:1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    error = relative_error(replay()[:1], expected)
    if not error < 0.1:
        raise NotMeasured(f"the graph's result is {error:.2g} from the right one")
    return replay
