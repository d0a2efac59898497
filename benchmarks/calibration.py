"""Calibration: seconds, tokens per second and peak memory, one process per measurement.

    python benchmarks/calibration.py                    CPU: memory at N and at 4 N tokens
    python benchmarks/calibration.py --gpu              370M shapes on 128 x 2,048 tokens, bf16

On a GPU a first batch is calibrated before the clock starts, so that Triton's tuning is not in it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

SMALL = {"model_type": "delta_net", "hidden_size": 256, "num_hidden_layers": 4, "num_heads": 4,
         "vocab_size": 1000, "intermediate_size": 512}  # fmt: skip
LARGE = {"hidden_size": 1024, "vocab_size": 32000, "intermediate_size": 2816}
CASES = {
    "small": SMALL,
    "delta_net_370M": {"model_type": "delta_net", "num_hidden_layers": 24, "num_heads": 8, **LARGE},
    "gated_deltanet_370M": {"model_type": "gated_deltanet", "num_hidden_layers": 23, "num_heads": 4,
                            "head_dim": 256, "expand_v": 1.0, **LARGE},
}  # fmt: skip


def measure(case: str, sequences: int, length: int, batch: int, device: str) -> dict[str, object]:
    import torch

    from statecut.models.checkpoint import create
    from statecut.models.loaded import Loaded
    from statecut.pruning.calibration import calibrate

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Loaded(create(CASES[case], seed=0, dtype=dtype).to(device))

    def batches(count):
        vocabulary = CASES[case]["vocab_size"]
        return [torch.randint(0, vocabulary, (batch, length)) for _ in range(count // batch)]

    if device == "cuda":
        calibrate(model, batches(batch), device=device)
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    calibrate(model, batches(sequences), device=device)
    seconds = time.monotonic() - started
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "case": case, "parameters": sum(p.numel() for p in model.model.parameters()),
        "tokens": sequences * length, "batch": batch, "seconds": round(seconds, 2),
        "tokens_per_second": round(sequences * length / seconds), "peak_MiB": round(peak),
    }  # fmt: skip


def in_a_process(*arguments: object) -> dict[str, object]:
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    print(row, flush=True)
    return row


def main() -> None:
    from statecut import logs

    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="370M shapes on the GPU")
    if parser.parse_args().gpu:
        for case in ("delta_net_370M", "gated_deltanet_370M"):
            in_a_process(case, 128, 2048, 8, "cuda")
    else:
        # Long enough for the allocator to have settled at N.
        n, four_n = (in_a_process("small", count, 512, 8, "cpu") for count in (64, 256))
        print(f"peak memory at 4 N over N: {four_n['peak_MiB'] / n['peak_MiB']:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        case, sequences, length, batch, device = sys.argv[2:]
        print(json.dumps(measure(case, int(sequences), int(length), int(batch), device)))
    else:
        main()
