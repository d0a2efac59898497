"""How long the first training step of one layer takes, most of it choosing tiles, on a GPU.

    python benchmarks/tuning.py [--architecture gated_deltanet] [--heads N] [--width N]
                                [--processes N] [--ways fla,compiled,again]

    fla         as it comes: Triton compiles and times candidates one after another
    compiled    candidates are compiled on all cores
    again       tuned and compiled before

Every way is so many processes at once, each of them a layer of its own, with a Triton cache that is
empty but for what the way says. Printed: the time until the last has its gradients, imports and
weights not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GPU = Path("/dev/nvidiactl")

WAYS = ("fla", "compiled", "again")


def first_step(options: argparse.Namespace) -> float:
    import torch
    from triton.runtime.autotuner import Autotuner

    from statecut.models.shapes import Shape
    from statecut.preflight import random_layer

    tritons = Autotuner._bench
    shape = Shape(options.architecture, options.heads, options.width, options.heads, 128)
    gated = options.architecture == "gated_deltanet"
    layer = random_layer(shape, "cuda", hidden_size=options.heads * 128, use_gate=gated)
    if options.way == "fla":
        Autotuner._bench = tritons
    x = torch.randn(8, 2048, options.heads * 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = layer(x)[0]
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(way: str, cache: Path, processes: int) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{way}: a process failed")
    return max(float(words.split()[-1]) for words in said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=["delta_net", "gated_deltanet"],
                        default="delta_net")  # fmt: skip
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64, help="key channels of a head")
    parser.add_argument("--processes", type=int, default=1, help="that start at once")
    parser.add_argument("--ways", default=",".join(WAYS), help="which, as in %(default)s")
    parser.add_argument("--way", choices=WAYS, help="only this, in this process")
    options = parser.parse_args()
    if options.way:
        print(first_step(options))
        return
    if not GPU.exists():
        parser.error("there is no GPU here")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {way: Path(folder) / way for way in WAYS} | {"again": Path(folder) / "compiled"}
        for way in options.ways.split(","):
            found[way] = measure(way, caches[way], options.processes)
            ratio = next(iter(found.values())) / found[way]
            print(f"{way}: {found[way]:.1f} s ({ratio:.1f} times)", flush=True)
    print(f"{options.processes} processes at once, {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
