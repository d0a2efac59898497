"""The backward pass of fla's delta rules at 32 key channels and fewer, on a Hopper: three ways.

    python hopper-backward.py      needs torch, triton, flash-linear-attention, an H100 or H200

    as it is     what `pip install` gives
    two warps    chunk_bwd_kernel_dqkwg without its candidates of four warps
    ptxas 13     TRITON_PTXAS_PATH: the ptxas for Blackwell that comes in Triton's own wheel

Each case is a process with a Triton cache of its own: a crash poisons what comes after it. All
other kernels have one candidate, so that it takes a minute, and what crashes is this one.
"""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WAYS = ("as it is", "two warps", "ptxas 13")
CASES = [("delta", width, heads) for width in (32, 16) for heads in (4, 8, 16)]
CASES += [("gated", 32, 16), ("delta", 64, 16)]
B, T, V = 2, 512, 128


def newer_ptxas():
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


def tuner_of(kernel):
    from triton.runtime.autotuner import Autotuner

    while hasattr(kernel, "fn") and not isinstance(kernel, Autotuner):
        kernel = kernel.fn
    return kernel if isinstance(kernel, Autotuner) else None


def case(rule, width, heads, way):
    """The worst relative error of o, dq, dk, dv, dbeta against the recurrence in fp32."""
    import torch
    import torch.nn.functional as F
    from fla.ops.common import chunk_o
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    for name, module in list(sys.modules.items()):
        for kernel in list(vars(module).values()) if name.startswith("fla.") else ():
            tuner = tuner_of(kernel)
            if tuner is None:
                continue
            if tuner is not tuner_of(chunk_o.chunk_bwd_kernel_dqkwg):
                tuner.configs = tuner.configs[:1]
            elif way == "two warps":
                tuner.configs = [config for config in tuner.configs if config.num_warps == 2]

    def recurrence(q, k, v, beta, g):
        q, k = F.normalize(q, dim=-1) * width**-0.5, F.normalize(k, dim=-1)
        S, o = v.new_zeros(B, heads, width, V), []
        for t in range(T):
            S = S * g[:, t, :, None, None].exp()
            read = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return torch.stack(o, 1)

    def kernel(q, k, v, beta, g):
        given = {"use_qk_l2norm_in_kernel": True}
        if rule == "gated":
            return chunk_gated_delta_rule(q, k, v, g=g.float(), beta=beta, **given)[0]
        return chunk_delta_rule(q, k, v, beta=beta, **given)[0]

    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(B, T, heads, *shape, device="cuda").bfloat16()  # noqa: E731
    inputs = [F.silu(draw(width)), F.silu(draw(width)), F.silu(draw(V)), draw().sigmoid()]
    inputs += [F.logsigmoid(draw() + 3) if rule == "gated" else torch.zeros_like(inputs[3])]
    upstream = draw(V)
    results = []
    for function, dtype in ((recurrence, torch.float32), (kernel, torch.bfloat16)):
        xs = [x.to(dtype).requires_grad_() for x in inputs]
        o = function(*xs)
        o.backward(upstream.to(o.dtype))
        results.append([o.detach(), *(x.grad for x in xs[:4])])
    errors = [((a - b.float()).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]
    print(f"{max(errors):.4f}")


def outcome(job):
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TRITON_CACHE_DIR": cache}
        if job[-1] == "ptxas 13":
            env["TRITON_PTXAS_PATH"] = str(newer_ptxas())
        done = subprocess.run(
            [sys.executable, __file__, *map(str, job)], env=env, capture_output=True, text=True
        )
    if done.returncode == 0:
        return done.stdout.split()[-1]
    lines = done.stderr.strip().splitlines() or ["died"]
    known = [line for line in lines if "illegal memory access" in line]
    return "illegal memory access" if known else lines[-1]


def main():
    import torch

    versions = {
        p: importlib.metadata.version(p) for p in ("torch", "triton", "flash-linear-attention")
    }
    for ptxas in (newer_ptxas().with_name("ptxas"), newer_ptxas()):
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
        versions[ptxas.name] = said.split("release ")[-1].split(",")[1].split()[0]
    print(torch.cuda.get_device_name(), *(f"{name} {v}" for name, v in versions.items()), sep=", ")
    print("\n| rule | d_k | heads |", " | ".join(WAYS), "|\n|---|---|---|" + "---|" * len(WAYS))
    jobs = [(*setting, way) for setting in CASES for way in WAYS]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        outcomes = dict(zip(jobs, pool.map(outcome, jobs), strict=True))
    for setting in CASES:
        print(
            "|", " | ".join([*map(str, setting), *(outcomes[*setting, way] for way in WAYS)]), "|"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        case(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
