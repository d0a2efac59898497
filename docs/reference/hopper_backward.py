"""The backward pass of fla's delta rules on an H100 or H200: see hopper-backward.md. Each case is a
process with a Triton cache of its own, as a crash poisons what comes after it. All kernels but
chunk_bwd_kernel_dqkwg have one tile. Needs torch, triton and flash-linear-attention."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

CASES = [("delta", width, heads) for width in (32, 16) for heads in (4, 8, 16)]
CASES += [("gated", 32, 16), ("delta", 64, 16)]
B, T, V = 2, 512, 128
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"


def tuner_of(kernel):
    while kernel is not None and not isinstance(kernel, triton.runtime.Autotuner):
        kernel = getattr(kernel, "fn", None)
    return kernel


def recurrence(q, k, v, beta, g):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g)[0]


def case(rule, width, heads, way):
    """The largest relative error of o, dq, dk, dv, dbeta against the recurrence in fp32."""
    from fla.ops.common.chunk_o import chunk_bwd_kernel_dqkwg
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    modules = [module for name, module in [*sys.modules.items()] if name.startswith("fla.")]
    for tuner in filter(None, (tuner_of(k) for m in modules for k in [*vars(m).values()])):
        if tuner is not tuner_of(chunk_bwd_kernel_dqkwg):
            tuner.configs = tuner.configs[:1]
        elif way == "two warps":
            tuner.configs = [config for config in tuner.configs if config.num_warps == 2]

    def kernel(q, k, v, beta, g):
        if rule == "gated":
            return chunk_gated_delta_rule(q, k, v, g.float(), beta, use_qk_l2norm_in_kernel=True)[0]
        return chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)[0]

    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(B, T, heads, *shape, device="cuda").bfloat16()  # noqa: E731
    inputs = [F.silu(draw(width)), F.silu(draw(width)), F.silu(draw(V)), draw().sigmoid()]
    inputs += [F.logsigmoid(draw() + 3) if rule == "gated" else torch.zeros_like(inputs[3])]
    upstream, results = draw(V), []
    for function, dtype in ((recurrence, torch.float32), (kernel, torch.bfloat16)):
        xs = [x.to(dtype).requires_grad_() for x in inputs]
        o = function(*xs)
        o.backward(upstream.to(o.dtype))
        results.append([o.detach(), *(x.grad for x in xs[:4])])
    errors = [((a - b.float()).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]
    print(f"{max(errors):.4f}")


if __name__ == "__main__" and sys.argv[1:]:
    case(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
elif __name__ == "__main__":
    for job in [(*c, way) for c in CASES for way in ("as it is", "two warps", "ptxas 13")]:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            if job[-1] == "ptxas 13":
                environment["TRITON_PTXAS_PATH"] = str(PTXAS)
            command = [sys.executable, __file__, *map(str, job)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        crash = "illegal memory access"
        print(*job, crash if crash in done.stderr else done.stdout.strip() or done.stderr, sep="\t")
