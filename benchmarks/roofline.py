"""Decoding against the roofline: the bytes of a step over the bandwidth of a copy, on a GPU.

    python benchmarks/roofline.py [--model NAME] [--widths N ...] [--batches N ...]
    python benchmarks/roofline.py --profile     and where the time of a step goes, by kernels
    python benchmarks/roofline.py --tiles       and the step with other tiles of the rule's kernel

A step of a model of config/paper.yaml, with random weights in bf16, has to read all weights (of the
embeddings one row a sequence), to read and write the states of all sequences, and to write and read
the logits. What its kernels pass on to one another is not counted: the GPU's cache holds it. Steps
are timed as reproduction.benchmarking.decoding does it, 32 of them in one CUDA graph.

At batch 256 the matrix products need about as long to compute as to read their weights, which the
roofline does not know.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.config import load_config
from statecut.process import FIXED

PAPER = Path(__file__).parents[1] / "config" / "paper.yaml"
TOKENS = 32  # steps of a graph
COPIED_BYTES = 4 << 30
LISTED = 14  # kernels of a profile
TILES = [(8, 1), (8, 2), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4)]  # fla: 8 values, 1 warp

# The parts of a step's bytes, and the kernels that move them.
PARTS = {
    "weights": r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas",
    "recurrent_state": r"fused_recurrent",
    "conv_state": r"causal_conv1d_update",
    "logits": r"reduce_kernel",
}
PUT_BACK = r"Memcpy|CatArray"  # once a graph: tokens collected, states put where it starts from


def step_bytes(generation: Any) -> dict[str, int]:
    """What one more token of all sequences must read and write, by parts."""
    from reproduction.generation import state_tensors

    model, batch = generation.model, len(generation.last)
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    weights = sum(parameter.nbytes for parameter in model.parameters())
    found = dict.fromkeys(PARTS, 0)
    found["weights"] = weights - (table is not head) * table.nbytes + batch * table[0].nbytes
    for layer in generation.state.layers:
        for name, state in layer.state.items():
            for tensor in state_tensors(state):
                found[name] += 2 * tensor.nbytes
    found["logits"] = 2 * batch * head[:, 0].nbytes
    return found


def copy_bandwidth() -> float:
    """Bytes per second that a copy within the GPU's memory reads and writes."""
    import torch

    from reproduction.benchmarking.timing import time_runs

    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    runs = time_runs(lambda: target.copy_(source), "cuda", warmup=5, repeats=20)
    return 2 * COPIED_BYTES / runs.median


# One step by kernels


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step."""

    name: str
    calls: float
    ms: float

    @property
    def part(self) -> str:
        """The bytes that it moves, or nothing that is counted."""
        return next((p for p, names in PARTS.items() if re.search(names, self.name, re.I)), "")


def profiled(replay: Any) -> list[Kernel]:
    """The kernels of a step, the longest first."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    kernels = [
        Kernel(row.key, row.count / TOKENS, row.self_device_time_total / 1e3 / TOKENS)
        for row in found.key_averages()
        if row.device_type == DeviceType.CUDA
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def profile_tables(
    kernels: list[Kernel], parts: dict[str, int], step_ms: float, bandwidth: float
) -> Iterator[str]:
    """Where the time of a step goes: by parts, then by kernels."""
    yield row("part", "GB", "ms at the roofline", "ms in its kernels", "% of the roofline",
              "% of the step")  # fmt: skip
    yield row(*["---"] * 6)
    for part, count in parts.items():
        ms = sum(kernel.ms for kernel in kernels if kernel.part == part)
        ideal = count / bandwidth * 1e3
        share = f"{100 * ideal / ms:.0f}" if ms else ""
        yield row(part, f"{count / 1e9:.2f}", f"{ideal:.3f}", f"{ms:.3f}", share,
                  f"{100 * ms / step_ms:.0f}")  # fmt: skip
    uncounted = [kernel for kernel in kernels if not kernel.part]
    put_back = sum(k.ms for k in uncounted if re.search(PUT_BACK, k.name))
    others = sum(k.ms for k in uncounted) - put_back
    gaps = step_ms - sum(kernel.ms for kernel in kernels)
    for name, ms in {
        "other kernels (norms, activations, residuals)": others,
        "put back for the next replay": put_back,
        "between kernels": gaps,
    }.items():
        yield row(name, "", "", f"{ms:.3f}", "", f"{100 * ms / step_ms:.0f}")
    yield ""
    yield row("kernel", "part", "calls", "µs a step", "% of the step")
    yield row(*["---"] * 5)
    for k in kernels[:LISTED]:
        yield row(k.name[:70].replace("|", "/"), k.part, f"{k.calls:.1f}", f"{1e3 * k.ms:.0f}",
                  f"{100 * k.ms / step_ms:.1f}")  # fmt: skip
    rest = kernels[LISTED:]
    ms = sum(kernel.ms for kernel in rest)
    yield row(f"{len(rest)} others", "", f"{sum(kernel.calls for kernel in rest):.1f}",
              f"{1e3 * ms:.0f}", f"{100 * ms / step_ms:.1f}")  # fmt: skip


# Other tiles of the rule's kernel


class Retiled:
    """A kernel of fla that is launched with other tiles than fla says."""

    def __init__(self, kernel: Any, rows: int, warps: int):
        self.kernel, self.rows, self.warps = kernel, rows, warps

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **given: Any) -> Any:
            values = given["V"]
            programs = grid[0] // -(-values // given["BV"]) * -(-values // self.rows)
            tiles = {"BV": self.rows, "num_warps": self.warps}
            return self.kernel[(programs,)](*args, **given | tiles)

        return launch


def tile_rows(model: Any, batch: int, width: int) -> Iterator[str]:
    from importlib import import_module
    from unittest.mock import patch

    rule = "gated_delta_rule" if model.config.model_type == "gated_deltanet" else "delta_rule"
    module = import_module(f"fla.ops.{rule}.fused_recurrent")
    name = f"fused_recurrent_{rule}_fwd_kernel"
    kernel = getattr(module, name)
    first = None
    for rows, warps in TILES:
        with patch.object(module, name, Retiled(kernel, rows, warps)):
            _, ms, _ = step(model, batch, tokens=8)
        first = first or ms
        yield row(width, batch, rows, warps, f"{ms:.3f}", f"{first / ms:.2f} x")


# All of it


def step(model: Any, batch: int, tokens: int = TOKENS) -> tuple[dict[str, int], float, Any]:
    """Its bytes by parts, its milliseconds, and the graph of several."""
    from reproduction.benchmarking.decoding import Generation, capture_graph
    from reproduction.benchmarking.timing import time_runs

    generation = Generation(model, batch, 1)
    parts = step_bytes(generation)
    replay = capture_graph(generation, tokens)
    runs = time_runs(replay, "cuda", warmup=2, repeats=9)
    return parts, 1e3 * runs.median / tokens, replay


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def measured(options: argparse.Namespace, spec: Any, widths: Iterable[int]) -> None:
    import torch

    from reproduction.benchmarking.decoding import many_first
    from reproduction.benchmarking.passes import random_model

    bandwidth = copy_bandwidth()
    print(f"{options.model}, {torch.cuda.get_device_name()}, torch {torch.__version__}; "
          f"a copy of {COPIED_BYTES >> 30} GiB: {bandwidth / 1e12:.2f} TB/s\n")  # fmt: skip
    print(row("d_k", "batch", *(f"{part}, GB" for part in PARTS), "ms at the roofline",
              "ms measured", "share", "tokens/s"))  # fmt: skip
    print(row(*["---"] * (6 + len(PARTS))), flush=True)
    later: list[str] = []
    tiles: list[str] = []
    for width in widths:
        model = random_model(spec, width, "cuda").eval()
        for batch in many_first(options.batches):
            parts, ms, replay = step(model, batch)
            ideal = sum(parts.values()) / bandwidth * 1e3
            print(row(width, batch, *(f"{count / 1e9:.3f}" for count in parts.values()),
                      f"{ideal:.3f}", f"{ms:.3f}", f"{100 * ideal / ms:.0f} %",
                      f"{batch / ms * 1e3:,.0f}"), flush=True)  # fmt: skip
            if options.profile:
                tables = profile_tables(profiled(replay), parts, ms, bandwidth)
                later += ["", f"### One step: d_k {width}, batch {batch}, {ms:.3f} ms", "", *tables]
            del replay
        if options.tiles:
            tiles += tile_rows(model, max(options.batches), width)
        del model
        torch.cuda.empty_cache()
    print("\n".join(later))
    if tiles:
        print("\n### The rule's kernel with other tiles: the whole step\n")
        print(row("d_k", "batch", "values a program", "warps", "ms", "faster"))
        print(row(*["---"] * 6))
        print("\n".join(tiles))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="delta_net_1.3B", help="its name in config/paper.yaml")
    parser.add_argument("--widths", type=int, nargs="+", metavar="N",
                        help="d_k; by default the model's, half and a quarter of it")  # fmt: skip
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 16, 1], metavar="N")
    parser.add_argument("--profile", action="store_true", help="also time each kernel of a step")
    parser.add_argument("--tiles", action="store_true", help="also try other tiles for the rule")
    options = parser.parse_args()
    models = load_config(PAPER).models
    if options.model not in models:
        parser.error(f"--model {options.model}: {PAPER.name} has {', '.join(models)}")
    import torch

    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU here")
    os.environ.update(FIXED)  # before fla is imported, which reads it
    from statecut.models.architectures import architecture

    config = models[options.model].fla_config()
    full = architecture(config).shape(config).width
    measured(options, models[options.model], options.widths or (full, full // 2, full // 4))


if __name__ == "__main__":
    main()
