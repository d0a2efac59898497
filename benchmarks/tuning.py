"""How long the first training step of one layer takes, most of it choosing tiles, on a GPU.

    python benchmarks/tuning.py [--architecture gated_deltanet] [--heads N] [--width N]

Once with Triton compiling a kernel's candidates one after another, once on all cores
(`keycut.models.kernels`): each in a process of its own, with nothing compiled before. "Again" is
the same step a second time in a third process, which finds everything on disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from keycut.forkserver import GPU

WAYS = {"one after another": "serial", "on all cores": "all", "again": "all"}


def first_step(options: argparse.Namespace) -> float:
    import torch
    from triton.runtime.autotuner import Autotuner

    from keycut.benchmarking.layers import mixer

    one_by_one = Autotuner._bench
    layer = mixer(
        options.architecture,
        hidden_size=options.heads * 128,
        num_heads=options.heads,
        width=options.width,
        head_v_dim=128,
        use_gate=options.architecture == "gated_deltanet",
        device="cuda",
        dtype=torch.bfloat16,
    )
    if options.way == "serial":
        Autotuner._bench = one_by_one
    x = torch.randn(8, 2048, options.heads * 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = layer(x)[0]
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=["delta_net", "gated_deltanet"],
                        default="delta_net")  # fmt: skip
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64, help="key channels of a head")
    parser.add_argument("--way", choices=["serial", "all"], help="only this, in this process")
    options = parser.parse_args()
    if options.way:
        print(first_step(options))
        return
    if not GPU.exists():
        parser.error("there is no GPU here")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for name, way in WAYS.items():
            cache = one if way == "serial" else other
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--way", way],
                env={**os.environ, "TRITON_CACHE_DIR": cache},
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            found[name] = float(done.stdout.split()[-1])
            ratio = found["one after another"] / found[name]
            print(f"{name}: {found[name]:.1f} s ({ratio:.1f} times)", flush=True)
    print(f"{len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
