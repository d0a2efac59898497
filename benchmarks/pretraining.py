"""flame through our launcher: the models of config/paper.yaml, some steps, converted and loaded.

    python benchmarks/pretraining.py --folder F --prepare [--text FILE ... --tokenizer FILE]
    python benchmarks/pretraining.py --folder F --out results.jsonl --models NAME ... --steps 40

The first writes the tokenizer and the packed text, on any machine: from files (.jsonl or .txt,
plain or packed) with a sentencepiece model, or from the installed packages' documentation with a
tokenizer of its own. The second needs a GPU and flame. Every model is a process of its own with a
time limit. The recipe is the paper's but for its steps, its warm-up and the sequences of a step;
`--activation-checkpoint none selective` trains each model both ways. What is in the file of results
already is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import existing

from reproduction.config import load_config
from statecut import logs
from statecut.errors import InputError
from statecut.files import read_json, write_json

CONFIG = Path(__file__).parents[1] / "config" / "paper.yaml"
MODELS = ("delta_net_370M", "delta_net_370M_head", "gated_deltanet_370M")
WARM = "warm"
CORPUS, SLICE, LENGTH = "text", "pretraining", 2048


def prepare(folder: Path, files: list[Path], tokenizer: Path | None) -> None:
    from reproduction.documentation import documentation, documentation_source
    from reproduction.new_tokenizers import convert_sentencepiece, train_tokenizer
    from statecut.data.packing import pack
    from statecut.data.sources import describe, read

    def texts() -> Iterator[str]:
        return read(*files) if files else documentation()

    if tokenizer is None:
        ours = train_tokenizer(texts(), folder / "tokenizer", vocabulary_size=8192, force=True)
    else:
        ours = convert_sentencepiece(tokenizer, folder / "tokenizer", force=True)
    pack(
        texts(), ours, folder / "tokens", sequence_length=LENGTH, seed=0, force=True,
        sequences={SLICE: 1024 if files else 256},
        source=describe(*files) if files else documentation_source(),
    )  # fmt: skip


def warm(name: str, batch: int) -> None:
    """One step of one layer, so that flame finds its tiles chosen: here the candidates are compiled
    on all cores, and there one after another."""
    import torch

    from statecut.models import create

    one_layer = load_config(CONFIG).models[name].model_copy(update={"num_hidden_layers": 1})
    model = create(one_layer.fla_config(), seed=0).cuda()
    ids = torch.randint(1000, (batch, LENGTH), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()


def one(arguments: argparse.Namespace, cell: str) -> dict[str, Any]:
    """Train, convert and load one model, with one way of activation checkpointing."""
    import torch

    from reproduction.pretraining.pretrain import pretrain_model, recipe_of
    from statecut.data.packing import PackedTokens
    from statecut.models import load
    from statecut.recovery.checkpoints import Output
    from statecut.recovery.loop import RESERVE

    name, mode = cell.rsplit("-", 1)
    if mode == WARM:
        warm(name, arguments.batch)
        return {}
    config = load_config(CONFIG)
    there = len(PackedTokens(arguments.folder / "tokens", slice_name=SLICE))
    recipe = recipe_of(config, name)
    wanted = arguments.steps * arguments.batch * arguments.share
    changed = recipe.model_copy(
        update={
            "data": f"{CORPUS}/{SLICE}",
            "epochs": -(-wanted // there),
            "steps": arguments.steps,
            "warmup": arguments.steps // 4,
            "batch": arguments.batch,
            "world_size": arguments.share,
            "activation_checkpoint": mode,
        }
    )
    source: Any = config.models[name].source
    config = config.model_copy(update={"recipes": {**config.recipes, source.recipe: changed}})
    out = arguments.folder / cell
    # As if a Slurm job ended then, with 30 seconds for saving.
    os.environ["SLURM_JOB_END_TIME"] = str(time.time() + arguments.limit + RESERVE - 30)
    output = Output(
        out, checkpoints=arguments.folder / ".checkpoints" / cell,
        tokenizer=arguments.folder / "tokenizer", force=True,
    )  # fmt: skip
    tokens = arguments.folder / "tokens"
    pace = pretrain_model(config, name, tokens, output, gpus=arguments.gpus)
    with open(out / "loss.csv") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    model = load(out, dtype=torch.bfloat16, device="cuda")
    ids = torch.from_numpy(PackedTokens(arguments.folder / "tokens")[:1]).cuda()
    with torch.no_grad():
        loaded = model(ids, labels=ids, use_cache=False).loss.item()
    return {
        "model": name,
        "activation_checkpoint": mode,
        "batch": arguments.batch,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "loss_of_the_loaded_model": loaded,
        "command": (out / "command.txt").read_text().strip(),
        **pace,
    }


def run(arguments: argparse.Namespace, cell: str) -> dict[str, Any]:
    words = [sys.executable, "-u", __file__, *sys.argv[1:], "--one", cell]
    began = time.monotonic()
    process = subprocess.Popen(words)
    try:
        # By then it should have stopped by itself.
        code = process.wait(arguments.limit + 90)
    except subprocess.TimeoutExpired:
        process.terminate()
        code = process.wait()
    result = {"cell": cell, "seconds": round(time.monotonic() - began, 1)}
    if code:
        return {**result, "error": f"ended with code {code}"}
    return {**result, **read_json(arguments.folder / f"{cell}.json")}


def main() -> None:
    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for text and models")
    parser.add_argument("--prepare", action="store_true", help="write the text, train nothing")
    parser.add_argument("--text", type=existing, nargs="+", default=[], help="files of text")
    parser.add_argument("--tokenizer", type=existing, help="a sentencepiece .model")
    parser.add_argument("--out", type=Path, help="file that gets a line of JSON per model")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="sequences at once on a GPU")
    parser.add_argument("--share", type=int, default=1, help="batches in a step")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--activation-checkpoint", nargs="+", default=["none"],
                        choices=["none", "selective", "full"])  # fmt: skip
    parser.add_argument("--limit", type=float, default=420, help="seconds for one model")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a process of ours does
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        try:
            found = one(arguments, arguments.one)
        except InputError as error:
            found = {"error": str(error)}
        write_json(arguments.folder / f"{arguments.one}.json", found)
        return
    if arguments.prepare or not (arguments.folder / "tokens").exists():
        prepare(arguments.folder, arguments.text, arguments.tokenizer)
    done = set()
    if arguments.out and arguments.out.exists():
        records = map(json.loads, arguments.out.read_text().splitlines())
        done = {record["cell"] for record in records if "error" not in record}
    cells = [f"{name}-{mode}" for name in arguments.models
             for mode in (WARM, *arguments.activation_checkpoint)]  # fmt: skip
    for cell in [] if arguments.prepare else cells:
        if cell in done:
            continue
        print(f"== {cell}", flush=True)
        result = json.dumps(run(arguments, cell))
        print(result, flush=True)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.write(result + "\n")


if __name__ == "__main__":
    main()
