"""Training on this machine: its pace, and that it survives being killed.

    python benchmarks/training.py               tokens/s of the demo's DeltaNet, on a CPU or a GPU
    python benchmarks/training.py --kills 10    a run killed ten times at random moments, and one
                                                never killed: same weights, bit for bit

The text is random: neither figure depends on it. Every run is a process of its own, forked from
one that has done the slow imports and nothing else.
"""

import argparse
import csv
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from reproduction.config import load_config
from statecut import logs
from statecut.data.packing import PackedTokens
from statecut.files import sha256, write_json

CONFIG = Path(__file__).parents[1] / "config" / "demo.yaml"
CURVE = "loss.csv"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["statecut.recovery.training", "statecut.models.shared_conv"])
WARMUP = 5  # steps before the clock: on a GPU the first ones tune kernels


def tokens(folder: Path, sequences: int, length: int, vocabulary: int) -> PackedTokens:
    folder.mkdir(exist_ok=True)
    rows = np.random.default_rng(0).integers(0, vocabulary, (sequences, length)).astype("<u2")
    (folder / "tokens.bin").write_bytes(rows.tobytes())
    write_json(folder / "manifest.json", {
        "sha256": sha256(folder / "tokens.bin"), "dtype": "uint16", "tokens": rows.size,
        "sequence_length": length, "sequences": sequences, "slices": {},
        "vocabulary_size": vocabulary, "tokenizer": "none", "tokenizer_digest": "", "seed": 0,
        "boundary": "eos", "source": {"name": "random", "revision": "0"}, "statecut": "0",
    })  # fmt: skip
    return PackedTokens(folder)


def run(root: Path, work: str, steps: int, out: str) -> None:
    """One run, from where it was left: pretraining, or recovery of the pretrained model's half."""
    logs.start()
    import torch

    from reproduction.pretraining.pretrain import pretrain
    from statecut.models import create, save
    from statecut.models.checkpoint import Checkpoint
    from statecut.pruning.slicing import cut_back, slice_model
    from statecut.recovery.checkpoints import Output
    from statecut.recovery.training import recover

    config = load_config(CONFIG)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    new = create(config.models["delta_net"].fla_config(), seed=0)
    output = Output(root / out, checkpoints=root / "running" / out, save_seconds=0)
    changes = {"steps": steps, "warmup": 2}
    assert config.recovery is not None
    if work == "pretraining":
        recipe = config.recipes["demo"].model_copy(update=changes)
        data = tokens(root / "tokens", recipe.sequences, 128, 1024)
        pretrain(new.to(device), data, recipe, output)
        return
    settings = config.recovery.model_copy(update=changes).settings()
    data = tokens(root / "tokens", settings.sequences, 128, 1024)
    save(new, root / "teacher", force=True)
    teacher = Checkpoint(root / "teacher")
    student = root / "student"
    slice_model(teacher, cut_back(teacher.shape, 16), student, dtype=None, force=True)
    recover(student, root / "teacher", data, settings, output, device=device)


def process(root: Path, work: str, steps: int, out: str) -> BaseProcess:
    going = PROCESSES.Process(target=run, args=(root, work, steps, out))
    going.start()
    return going


def steps_done(root: Path, out: str) -> int:
    rows = [path.read_text().count("\n") for path in (root / "running" / out).glob(f"*/{CURVE}")]
    return max(rows, default=1) - 1


def finish(going: BaseProcess, expected: int = 0) -> None:
    going.join()
    if going.exitcode != expected:
        sys.exit(f"a run ended with {going.exitcode}, expected {expected}")


def pace(work: str, steps: int) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        going = process(root, work, WARMUP + steps, work)
        started = None
        while going.is_alive():
            done = steps_done(root, work)
            if started is None and done >= WARMUP:
                started = time.monotonic(), done
            if done == WARMUP + steps:
                break
            time.sleep(0.01)
        ended = time.monotonic()
        finish(going)
        assert started is not None
        with open(root / work / CURVE) as file:
            rows = list(csv.DictReader(file))
        seen = int(rows[-1]["tokens"]) - int(rows[started[1] - 1]["tokens"])
    seconds = ended - started[0]
    print(f"{work}: {seen:,} tokens in {seconds:.1f} s, {seen / seconds:,.0f} tokens/s", flush=True)


def killed(work: str, kills: int, steps: int) -> None:
    """Kill when a random number of steps is reached, and a random while after."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        finish(process(root, work, steps, "unbroken"))
        moments = []
        for wanted in sorted(random.sample(range(1, steps - 5), kills)):
            going = process(root, work, steps, "killed")
            while steps_done(root, "killed") < wanted and going.is_alive():
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.2))
            going.kill()
            finish(going, expected=-signal.SIGKILL)
            moments.append(steps_done(root, "killed"))
        finish(process(root, work, steps, "killed"))
        names = ("model.safetensors", CURVE)
        pairs = [[sha256(root / out / name) for out in ("unbroken", "killed")] for name in names]
    said = ", ".join(map(str, moments))
    print(f"{work}: killed with kill -9 at steps {said} of {steps}")
    for name, (unbroken, survived) in zip(names, pairs, strict=True):
        print(f"  {name}: {unbroken[:16]} never killed, {survived[:16]} killed", flush=True)
        if unbroken != survived:
            sys.exit(f"{work}: {name} differs")


def main() -> None:
    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, help="kill a run so often instead")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run")
    arguments = parser.parse_args()
    print(f"{os.environ.get('OMP_NUM_THREADS', 'all')} threads of {os.cpu_count()} cores")
    for work in ("pretraining", "recovery"):
        if arguments.kills is None:
            pace(work, arguments.steps)
        else:
            killed(work, arguments.kills, arguments.steps)


if __name__ == "__main__":
    main()
