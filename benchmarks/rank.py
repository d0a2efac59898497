"""Ranks of all states along a sequence, against one SVD on the CPU per token, head and layer.

    python benchmarks/rank.py [--tokens N] [--svds N]           a small DeltaNet on the CPU
    python benchmarks/rank.py --gpu [CASE ...]                  370M shapes on the GPU, bf16

Both begin with keys, values and gates from a forward pass, which is timed apart. Statecut goes
through all states and ends with their effective ranks. The other way steps through the tokens and
takes an SVD of every state; it is timed on some states, spread over tokens and heads, and the
total is the median of these times the number of states, stepping not counted. Printed beside it:
how far the effective ranks of the two lie apart. The first run of each shape is not timed. Seconds
are of the clock on a GPU, and of the processor on a CPU, where other work would slow both ways
unevenly: set OMP_NUM_THREADS=1 there, or all threads count. The forward pass is that of the plain
PyTorch functions on both, so that no kernel has to be tuned first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial

import torch

from reproduction.analysis.spectra import effective_ranks
from reproduction.analysis.states import BLOCK_BYTES, Writes, states_in_blocks, writes
from statecut.models import create
from statecut.models.delta_rule import no_tf32
from statecut.models.fixes.fla import plain_kernels_in_place
from statecut.pruning.conditioning import effective_rank

LARGE = {"hidden_size": 1024, "vocab_size": 32000, "intermediate_size": 2816}
CASES = {
    "small": {"model_type": "delta_net", "hidden_size": 256, "num_hidden_layers": 2,
              "num_heads": 2, "vocab_size": 1000, "intermediate_size": 512},
    "delta_net_370M": {"model_type": "delta_net", "num_hidden_layers": 24, "num_heads": 8, **LARGE},
    "gated_deltanet_370M": {"model_type": "gated_deltanet", "num_hidden_layers": 23, "num_heads": 4,
                            "head_dim": 256, "expand_v": 1.0, **LARGE},
}  # fmt: skip


def seconds(function, device: str):
    if device == "cpu":
        started = time.process_time()
        result = function()
        return time.process_time() - started, result
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return time.perf_counter() - started, result


def ranks(w: Writes) -> torch.Tensor:
    """(T, heads of all layers)."""
    with no_tf32():
        return torch.cat([
            effective_ranks(block.flatten(0, 1)).view(len(block), -1).cpu()
            for block in states_in_blocks(w)
        ])  # fmt: skip


def svd_by_svd(w: Writes, found: torch.Tensor, svds: int) -> tuple[float, float]:
    """The median seconds of an SVD on the CPU, and the largest relative difference of er."""
    T, H = found.shape
    every = max(1, T * H // svds)
    times, apart, first = [], 0.0, 0
    for block in states_in_blocks(w):
        for flat in range(-(-first * H // every) * every, (first + len(block)) * H, every):
            t, head = divmod(flat, H)
            state = block[t - first, head].cpu()
            spent, sigma = seconds(partial(torch.linalg.svdvals, state), "cpu")
            times.append(spent)
            apart = max(apart, abs(float(found[t, head] / effective_rank(sigma)) - 1))
        first += len(block)
    return statistics.median(times), apart


def measure(case: str, tokens: int, svds: int, device: str) -> str:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = create(CASES[case], seed=0, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, CASES[case]["vocab_size"], (tokens,), generator=generator)
    with plain_kernels_in_place():
        ranks(writes(model, ids))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with plain_kernels_in_place():
        forward, w = seconds(lambda: writes(model, ids), device)
    fast, found = seconds(lambda: ranks(w), device)
    one, apart = svd_by_svd(w, found, svds)
    slow = one * found.numel()
    d_k, d_v = w.k.shape[-1], w.v.shape[-1]
    lines = [
        f"{case}: {tokens:,} tokens, {found.shape[1]} heads, {found.numel():,} states "
        f"{d_k} x {d_v}, device: {device}, threads: {torch.get_num_threads()} of "
        f"{os.cpu_count()} cores",
        f"  forward pass                    {forward:9.2f} s",
        f"  states and effective ranks      {fast:9.2f} s   {fast / found.numel() * 1e6:.0f} us a "
        f"state, blocks of {BLOCK_BYTES / 2**20:.0f} MiB",
        f"  one SVD on the CPU per state    {slow:9.1f} s   extrapolated from {one * 1e6:.0f} us, "
        f"the median of {svds:,} or so",
        f"  times faster                    {slow / fast:9.1f}",
        f"  largest relative difference     {apart:9.1e}   of an effective rank",
    ]
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
        lines.append(f"  peak memory                     {peak:9.0f} MiB")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="370M shapes on the GPU")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the sequence")
    parser.add_argument("--svds", type=int, default=500, help="SVDs that are timed")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.gpu and not torch.cuda.is_available():
        parser.error(
            f"--gpu: torch {torch.__version__} finds no GPU here; leave it out for the CPU"
        )
    large = ("delta_net_370M", "gated_deltanet_370M")
    cases = options.cases or (large if options.gpu else ("small",))
    for case in cases:
        device = "cuda" if options.gpu else "cpu"
        print(measure(case, options.tokens, options.svds, device), flush=True)


if __name__ == "__main__":
    main()
