"""The same weights on a GPU and on a CPU: how far apart are logits and gradients?

    python benchmarks/gpu_vs_cpu.py [--jobs N] [CASE ...]

Every case is a small model (two layers, values 128 wide) computed three times in processes of
their own: by fla's kernels on the GPU, by Statecut's plain PyTorch on the CPU in the same type, and
on the CPU in float32, which is the measure for both. Printed: the largest difference of a logit
over the largest logit, and the worst relative error (norm) of a parameter's gradient. On the GPU
also single steps against the full pass, and a left-padded batch against its rows alone.
The first step of every width makes Triton tune its kernels: some minutes, shared by --jobs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

COMMON = {"hidden_size": 256, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 1000,
          "intermediate_size": 256, "initializer_range": 0.05}  # fmt: skip
DELTA = {"model_type": "delta_net", "expand_v": 1.0, **COMMON}
SHARED = {**DELTA, "model_type": "delta_net_shared_conv"}
GATED = {"model_type": "gated_deltanet", **COMMON}
CASES = {
    **{f"delta_net-{w}": {**DELTA, "expand_k": 2 * w / 256} for w in (128, 76, 64)},
    "shared_head-128": {**SHARED, "conv_sharing": "head"},
    "shared_all-128": {**SHARED, "conv_sharing": "all"},
    **{f"gated-{w}": {**GATED, "head_dim": w, "expand_v": 128 / w} for w in (128, 76, 64)},
    **{f"gated-{w}-float32": {**GATED, "head_dim": w, "expand_v": 128 / w} for w in (128, 76, 64)},
    "gated-64-value_heads": {**GATED, "head_dim": 64, "expand_v": 2.0, "num_v_heads": 4},
}


def compute(folder: Path, out: Path, device: str, dtype: str) -> None:
    """One process: logits and gradients, and on the GPU what depends on caches and padding."""
    import torch

    from statecut.models import load

    model = load(folder, dtype=getattr(torch, dtype), device=device)
    ids = torch.randint(0, 1000, (2, 300), generator=torch.Generator().manual_seed(0)).to(device)
    result = model(ids, labels=ids)
    logits = result.logits.detach().clone()  # fla's loss writes its gradient over them
    result.loss.backward()
    found = {"logits": logits, **{n: p.grad for n, p in model.named_parameters()}}
    if device == "cuda":
        with torch.no_grad():
            found |= steps_and_padding(model, ids)
    torch.save({name: tensor.detach().float().cpu() for name, tensor in found.items()}, out)


def steps_and_padding(model, ids):
    import torch

    full = model(ids).logits
    out = model(ids[:, :268], use_cache=True)
    pieces = [out.logits]
    for t in range(268, 300):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        pieces.append(out.logits)
    lengths = (300, 200)
    mask = torch.stack([torch.arange(300) >= 300 - n for n in lengths]).long().to(ids.device)
    padded = model(ids * mask, attention_mask=mask).logits
    alone = [model(ids[i : i + 1, -n:]).logits[0] for i, n in enumerate(lengths)]
    return {
        "steps": torch.cat(pieces, 1), "full": full,
        "padded": torch.cat([padded[i][-n:] for i, n in enumerate(lengths)]),
        "alone": torch.cat(alone),
    }  # fmt: skip


def run(name: str, root: Path) -> dict[str, float | str]:
    import torch

    dtype = "float32" if name.endswith("float32") else "bfloat16"
    folder = root / name
    found = {}
    for which, device, kind in (
        ("gpu", "cuda", dtype), ("cpu", "cpu", dtype), ("exact", "cpu", "float32")
    ):  # fmt: skip
        out = root / f"{name}.{which}.pt"
        hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        arguments = [sys.executable, __file__, "--compute", folder, out, device, kind]
        done = subprocess.run(
            list(map(str, arguments)), env={**os.environ, **hidden}, capture_output=True, text=True
        )
        if done.returncode:
            return {"case": name, "failed": f"{which}: {done.stderr.strip().splitlines()[-1]}"}
        found[which] = torch.load(out)
    exact = found["exact"]
    row: dict[str, float | str] = {"case": name}
    for label, a, b in (
        ("gpu_cpu", found["gpu"], found["cpu"]),
        ("gpu_exact", found["gpu"], exact),
        ("cpu_exact", found["cpu"], exact),
    ):
        row[f"{label}_logits"] = largest(a["logits"], b["logits"])
        row[f"{label}_gradients"] = max(norm(a[n], b[n]) for n in exact if n != "logits")
    errors = {n: norm(found["gpu"][n], exact[n]) for n in exact if n != "logits"}
    row["worst"] = max(errors, key=lambda n: errors[n])
    row["steps"] = largest(found["gpu"]["steps"], found["gpu"]["full"])
    row["padding"] = largest(found["gpu"]["padded"], found["gpu"]["alone"])
    return row


def largest(a, b) -> float:
    return float((a - b).abs().max() / b.abs().max())


def norm(a, b) -> float:
    return float((a - b).norm() / b.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")

    import torch

    from statecut.models import create, save

    names = options.cases or list(CASES)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        root = Path(folder)
        for name in names:
            # bf16 weights for all, so that float32 runs compute with the same numbers.
            save(create(CASES[name], seed=1, dtype=torch.bfloat16), root / name)
        # As they end: tuning takes minutes, and what is printed is not lost.
        for done in as_completed([pool.submit(run, name, root) for name in names]):
            rows.append(done.result())
            cells = (
                f"{key} {value:.1e}" if isinstance(value, float) else str(value)
                for key, value in rows[-1].items()
            )
            print("  ".join(cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compute"]:
        compute(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main()
