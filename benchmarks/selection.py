"""Selection from Gram matrices against column-pivoted QR of the activations.

    python benchmarks/selection.py [--all] [--repeats N]

Channels are selected at four compression ratios in every head of a model of 24 layers, 16 heads
and 128 key channels. Statecut starts from the Gram matrices that calibration leaves, factors each
once and then makes the swaps for every width. The other way is a column-pivoted QR of 5,000 rows
for each head and ratio: R alone, its swaps not counted. It is timed in one head of every layer, or
in all with --all, and the total is the fastest of these times the number of heads and ratios, so
that a busy machine cannot flatter us. The Gram matrices of those rows are
calibration's: the ratio leaves them out, the line below it says what they take on one core. Where
other work runs beside it, set OPENBLAS_NUM_THREADS=1, or LAPACK's threads wait for one another.
Volumes are compared in every head.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from statecut.pruning.rrqr import StrongRRQR, pivoted_cholesky, strong_swaps

LAYERS, HEADS, D_K, ROWS = 24, 16, 128, 5000
WIDTHS = {0.3: 89, 0.4: 76, 0.5: 64, 0.75: 32}


def keys(head: int) -> Tensor:
    """(rows, d_k): SiLU of correlated Gaussians whose spectrum decays to a hundredth."""
    generator = torch.Generator().manual_seed(head)
    noise = torch.randn(ROWS, D_K, generator=generator, dtype=torch.float64)
    mixing = torch.randn(D_K, D_K, generator=generator, dtype=torch.float64)
    spectrum = torch.logspace(0, -2, D_K, dtype=torch.float64)
    return torch.nn.functional.silu(noise * spectrum @ torch.linalg.qr(mixing).Q)


def select(gram: Tensor) -> list[StrongRRQR]:
    """The fast way: one result per width from gram (layers, heads, d_k, d_k)."""
    factor = pivoted_cholesky(gram)
    return [strong_swaps(factor, keep) for keep in WIDTHS.values()]


def table(
    fast: list[float], slow: list[float], built: float, found: list[StrongRRQR], logs: Tensor
) -> str:
    """Seconds of each run of the fast way, of each QR, and of all Gram matrices; log |R_ii| of
    pivoted QR (heads, d_k)."""
    fast_total = statistics.median(fast)
    runs = LAYERS * HEADS * len(WIDTHS)
    slow_total = min(slow) * runs
    lines = [
        f"{LAYERS * HEADS} heads, d_k {D_K}, {len(WIDTHS)} ratios, "
        f"threads: {torch.get_num_threads()}",
        f"  strong RRQR from Gram matrices  {fast_total:8.3f} s   median of {len(fast)}, "
        f"{min(fast):.3f} to {max(fast):.3f}",
        f"  pivoted QR of {ROWS:,} x {D_K}     {slow_total:8.1f} s   "
        f"extrapolated: {runs:,} times the fastest of {len(slow)}, "
        f"{min(slow) * 1e3:.0f} ms (median {statistics.median(slow) * 1e3:.0f})",
        f"  times faster                    {slow_total / fast_total:8.0f}",
        f"  the Gram matrices before        {built:8.3f} s   of {ROWS:,} rows a head, one core; "
        f"with them {slow_total / (fast_total + built):.0f} times faster",
        "",
        "                      largest     log-volume less that of pivoted QR",
        "  ratio  kept  swaps  gain left   smallest       mean   heads below -1e-9",
    ]
    for (ratio, keep), result in zip(WIDTHS.items(), found, strict=True):
        more = result.log_volume.flatten() - logs[:, :keep].sum(-1)
        lines.append(
            f"  {ratio:5}  {keep:4}  {int(result.swaps.sum()):5}  {result.largest_gain.max():9.3f}"
            f"   {more.min():+8.1e}   {more.mean():+8.1e}   {int((more < -1e-9).sum()):17}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="runs of the fast way")
    parser.add_argument("--all", action="store_true", help="time the QR of every head")
    arguments = parser.parse_args()

    heads = LAYERS * HEADS
    gram = torch.empty(heads, D_K, D_K, dtype=torch.float64)
    logs = torch.empty(heads, D_K, dtype=torch.float64)
    slow, built = [], 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for what is not timed: steady beside other work
    for head in range(heads):
        sample = keys(head)
        start = time.process_time()  # of one thread: steady beside other work
        gram[head] = sample.mT @ sample
        built += time.process_time() - start
        if arguments.all or head % HEADS == 0:
            start = time.perf_counter()
            scipy.linalg.qr(sample.numpy(), mode="r", pivoting=True)
            slow.append(time.perf_counter() - start)
        # The same pivots as of the tall matrix, at a fraction of the time.
        R = torch.linalg.qr(sample, mode="r").R.numpy()
        R, _ = scipy.linalg.qr(R, mode="r", pivoting=True)
        logs[head] = torch.from_numpy(np.log(np.abs(np.diag(R))))
        if (head + 1) % 96 == 0:
            print(f"prepared {head + 1} of {heads} heads", file=sys.stderr, flush=True)
    torch.set_num_threads(threads)

    gram = gram.reshape(LAYERS, HEADS, D_K, D_K)
    found = select(gram)
    fast = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        select(gram)
        fast.append(time.perf_counter() - start)
    print(table(fast, slow, built, found, logs))


if __name__ == "__main__":
    main()
