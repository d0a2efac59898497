"""A large model in several files: seconds and peak memory of pruning by L1, of inspection and of
calibration.

    python benchmarks/large.py --folder FOLDER                `statecut inspect`, and
                                                              `statecut prune` by L1
    python benchmarks/large.py --folder FOLDER --calibrate cuda --layers 48
                                                              layer by layer, on 128 x 2,048 tokens

The model has random weights in the form of Gated DeltaNet, and the layer shapes of Qwen3.5-27B's
delta rule and MLP; 48 layers of it are 42 GB. FOLDER must be new; it is removed at the end.
"""

import argparse
import json
import os
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

    from statecut.models import kernels

    kernels.prepare()
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def write_shards(folder: Path, layers: int, shard_bytes: int) -> dict[str, object]:
    """Random bf16 weights, in files of at most so many bytes unless a tensor is larger."""
    import torch
    from safetensors.torch import save_file

    config = {**LAYERS_27B, "num_hidden_layers": layers}
    shapes = parameter_shapes(config)
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    # Drawn once and repeated: tens of billions of random numbers would take longer than the rest.
    generator = torch.Generator().manual_seed(0)
    numbers = torch.empty(2**24 + 43).uniform_(-0.03, 0.03, generator=generator).bfloat16()
    files = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            count = sizes[name] // 2
            repeats = -(-count // len(numbers))
            tensors[name] = numbers.repeat(repeats)[:count].clone().view(shapes[name])
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
        print(f"written {file}", file=sys.stderr, flush=True)
    total = sum(sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    largest = max(sum(sizes[name] for name in names) for names in shards)
    return {
        "layers": layers, "GB": round(total / 1e9, 2), "shards": len(shards),
        "largest_shard_GiB": round(largest / 2**30, 2),
    }  # fmt: skip


def time_command(*arguments: object) -> dict[str, object]:
    """Of statecut."""
    command = [sys.executable, "-m", "statecut.cli", *map(str, arguments)]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    if status:
        sys.exit(f"statecut {arguments[0]} failed with status {status}")
    return {"seconds": round(seconds, 1), "peak_GiB": round(usage.ru_maxrss / 2**20, 2)}


def time_calibration(
    model: Path, device: str, sequences: int, length: int, batch: int
) -> dict[str, object]:
    import torch

    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.calibration import calibrate_layerwise

    checkpoint = Checkpoint(model)
    ids = torch.randint(0, checkpoint.config["vocab_size"], (sequences, length))
    started = time.monotonic()
    calibrate_layerwise(checkpoint, ids.split(batch), device=device)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = {"tokens": ids.numel(), "device": device, "seconds": round(seconds, 1)}
    if device == "cuda":
        row["peak_GPU_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return {**row, "peak_GiB": round(peak, 2)}


def in_a_process(part: str, *arguments: object) -> dict[str, object]:
    """The peak of a process counts from its parent's at its start, so that one stays small."""
    command = [sys.executable, __file__, part, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, removed at last")
    parser.add_argument("--layers", type=int, default=8, help="of 766 MB each; %(default)s")
    parser.add_argument("--shard-bytes", type=int, default=4_000_000_000, help="%(default)s")
    parser.add_argument("--calibrate", choices=["cpu", "cuda"], help="instead of pruning")
    parser.add_argument("--sequences", type=int, default=128, help="%(default)s")
    parser.add_argument("--length", type=int, default=2048, help="%(default)s")
    parser.add_argument("--batch", type=int, default=8, help="%(default)s")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"--folder {options.folder}: exists already, give a new folder")
    model = options.folder / "model"
    try:
        sizes = in_a_process("--write", model, options.layers, options.shard_bytes)
        if options.calibrate:
            row = in_a_process(
                "--time-calibration", model, options.calibrate, options.sequences, options.length,
                options.batch,
            )  # fmt: skip
            print(json.dumps(sizes | {"command": "calibration"} | row))
            return
        prune = ("prune", model, options.folder / "pruned", "--method", "l1")
        for command in (("inspect", model), (*prune, "--ratio", "0.5", "--no-refit")):
            print(json.dumps(sizes | {"command": command[0]} | time_command(*command)))
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--write", folder, layers, shard_bytes]:
            print(json.dumps(write_shards(Path(folder), int(layers), int(shard_bytes))))
        case ["--time-calibration", folder, device, *counts]:
            from statecut import logs

            logs.start()
            print(json.dumps(time_calibration(Path(folder), device, *map(int, counts))))
        case _:
            main()
