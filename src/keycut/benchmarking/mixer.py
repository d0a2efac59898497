"""One layer: how many tokens pass it in a second, and the memory that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from keycut.benchmarking.layers import mixer
from keycut.benchmarking.machine import default_device, machine, timed_dtype
from keycut.benchmarking.timing import memory_for, peak_memory, timed
from keycut.config import Measurement, MixerBenchmark

WORDS = {
    "forward": "forward pass of the layer, without gradients",
    "training": "forward and backward pass of the layer, gradients of its input and weights, "
    "without optimizer",
}


def measure(
    benchmark: MixerBenchmark,
    cell: Measurement,
    device: str | None,
    seconds: float | None,
) -> Iterator[tuple[str, Any]]:
    """The machine, then the figures of one cell, each by its name."""
    device = device or default_device()
    yield "machine", machine(device)
    with memory_for(benchmark.batch):
        run = layer_run(benchmark, cell, device)
        runs = timed(
            run, device, warmup=benchmark.warmup, repeats=benchmark.repeats, seconds=seconds
        )
        yield "tokens_per_s", runs.rate(benchmark.batch * benchmark.length)
        yield "peak_memory_gib", peak_memory(run, device)


def layer_run(
    benchmark: MixerBenchmark, cell: Measurement, device: str
) -> Callable[[], torch.Tensor]:
    """One pass of the layer over a batch."""
    dtype = timed_dtype(device)
    layer = mixer(
        cell.kernel,
        hidden_size=benchmark.hidden_size,
        num_heads=benchmark.num_heads,
        width=cell.width,
        head_v_dim=benchmark.head_v_dim,
        use_gate=benchmark.mixers[cell.subject].use_gate,
        device=device,
        dtype=dtype,
    )
    shape = (benchmark.batch, benchmark.length, benchmark.hidden_size)
    x = torch.randn(shape, device=device, dtype=dtype)
    if not cell.trains:
        layer.eval()
        return torch.inference_mode()(lambda: layer(x)[0])
    upstream = torch.randn_like(x)
    x.requires_grad_()

    def train() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(x)[0]
        out.backward(upstream)
        return out

    return train
