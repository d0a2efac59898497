"""`keycut prune --method l1` of a large model in shards: seconds and peak memory.

    python benchmarks/large.py --folder FOLDER          random weights with a 27B model's layers

The layers are those of Qwen3.5-27B's delta rule and MLP, in the form of Gated DeltaNet: fewer of
them, as the time and the disk are, but of their true shapes. FOLDER must be new, and is removed.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

LAYERS_27B = {
    "model_type": "gated_deltanet", "architectures": ["GatedDeltaNetForCausalLM"],
    "hidden_size": 5120, "intermediate_size": 17408, "num_heads": 16, "head_dim": 128,
    "num_v_heads": 48, "expand_v": 1.0, "use_gate": True, "use_short_conv": True, "conv_size": 4,
    "vocab_size": 248320, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def parameter_shapes(config: dict) -> dict[str, list[int]]:
    """Of all its parameters, by name."""
    import torch

    from keycut.models import kernels

    kernels.prepare()
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def write_shards(folder: Path, config: dict, shard_bytes: int) -> dict[str, object]:
    """Random bf16 weights, in files of at most so many bytes unless a tensor is larger."""
    import torch
    from safetensors.torch import save_file

    shapes = parameter_shapes(config)
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    generator = torch.Generator().manual_seed(0)
    for file, names in zip(files, shards, strict=True):
        tensors = {
            name: torch.empty(shapes[name], dtype=torch.bfloat16).uniform_(
                -0.03, 0.03, generator=generator
            )
            for name in names
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        print(f"written {file}", file=sys.stderr, flush=True)
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {n: f for f, names in zip(files, shards, strict=True) for n in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {
        "layers": config["num_hidden_layers"], "GB": round(sum(sizes) / 1e9, 2),
        "shards": len(shards), "largest_shard_GB": round(max(sizes) / 1e9, 2),
    }  # fmt: skip


def time_prune(model: Path, out: Path, ratio: float) -> dict[str, object]:
    command = [sys.executable, "-m", "keycut.cli", "prune", str(model), str(out),
               "--method", "l1", "--ratio", str(ratio), "--no-refit"]  # fmt: skip
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = time.monotonic() - started
    # The largest child so far: generating the model is done in another one, which is larger.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
    return {"ratio": ratio, "seconds": round(seconds, 1), "peak_GiB": round(peak, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, removed at last")
    parser.add_argument("--layers", type=int, default=8, help="of 766 MB each")
    parser.add_argument("--shard-bytes", type=int, default=4_000_000_000)
    parser.add_argument("--ratio", type=float, default=0.5)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"--folder {options.folder}: exists already, give a new folder")
    try:
        config = {**LAYERS_27B, "num_hidden_layers": options.layers}
        sizes = write_shards(options.folder / "model", config, options.shard_bytes)
        row = time_prune(options.folder / "model", options.folder / "pruned", options.ratio)
        print(json.dumps(sizes | row))
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
