"""What recovery gives back at the demo's size: held-out perplexity before and after.

    python benchmarks/recovery_demo.py FOLDER [--models delta_net gated_deltanet] [--out FILE]

The demo's models are trained, pruned by every method to 50 % and 25 % of their key channels, and
recovered, all as config/demo.yaml says; so is the unpruned model, which shows what a little more
training is worth by itself. What FOLDER holds already is not made again. On a CPU, some minutes a
model. Perplexity is per token, over the sequences that nothing else sees.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from keycut import logs
from keycut.calibration import calibrate_folder
from keycut.config import Config, load_config, width
from keycut.data.corpora import make_tokenizer, pack_corpus
from keycut.data.packing import PackedTokens
from keycut.data.tokenizer import load_tokenizer
from keycut.models import load
from keycut.models.checkpoint import Checkpoint
from keycut.selection.select import select
from keycut.selection.statistics import ModelStatistics
from keycut.slicing import slice_model
from keycut.training.output import Output
from keycut.training.recovery import recover
from keycut.training.trainers import pretrain_model

CONFIG = Path(__file__).parents[1] / "config" / "demo.yaml"
TOKENIZER = "demo"
RATIOS = (0.5, 0.75)


def packed(config: Config, folder: Path, data: str) -> tuple[Path, str]:
    """The packed text of a `corpus/slice`, and the name of the slice; the tokenizer beside it."""
    corpus, slice_name = data.split("/")
    tokenizer, out = folder / "tokenizer", folder / "tokens" / corpus
    if not tokenizer.exists():
        make_tokenizer(config, TOKENIZER, tokenizer)
    if not out.exists():
        pack_corpus(config, corpus, load_tokenizer(tokenizer), out)
    return out, slice_name


def sequences(config: Config, folder: Path, data: str) -> PackedTokens:
    tokens, slice_name = packed(config, folder, data)
    return PackedTokens(tokens, slice_name=slice_name)


def perplexity(folder: Path, data: PackedTokens) -> float:
    """exp of the mean cross-entropy of a token given those before it in its sequence."""
    model, total = load(folder), 0.0
    with torch.no_grad():
        for start in range(0, len(data), 32):
            ids = torch.from_numpy(data[start : start + 32])
            total += model(ids, labels=ids, use_cache=False).loss.item() * len(ids)
    return math.exp(total / len(data))


def before_and_after(
    config: Config, folder: Path, student: Path, teacher: Path
) -> tuple[float, float]:
    assert config.recovery is not None
    out = student.with_name(f"{student.name}-recovered")
    if not out.exists():
        data = sequences(config, folder, config.recovery.data)
        recover(student, teacher, data, config.recovery, Output(out, folder / ".checkpoints"))
    assert config.evaluation.made_from is not None
    held_out = sequences(config, folder, config.evaluation.made_from)
    return perplexity(student, held_out), perplexity(out, held_out)


def compare(config: Config, name: str, folder: Path, say: Any) -> None:
    home, recipe = folder / name, config.recipes["demo"]
    tokens, _ = packed(config, folder, recipe.data)
    teacher = home / "full"
    if not teacher.exists():
        output = Output(teacher, folder / ".checkpoints", tokenizer=folder / "tokenizer")
        pretrain_model(config, name, tokens, output, gpus=0)
    model = Checkpoint(teacher)
    say(name, "unpruned", 0.0, *before_and_after(config, folder, teacher, teacher))
    data = sequences(config, folder, config.calibration.data)
    calibration = calibrate_folder(
        teacher,
        data,
        name=config.calibration.data,
        sequences=config.calibration.sequences,
        rows=config.calibration.rows,
        seed=0,
        device="cpu",
    )
    for method, settings in config.methods.items():
        selections = select(
            settings.algorithm,
            ModelStatistics(model, calibration),
            [width(model.shape.width, ratio) for ratio in RATIOS],
            target=settings.target,
            **settings.options,
        )
        for ratio, selection in zip(RATIOS, selections, strict=True):
            student = home / f"{method}-{ratio:g}"
            if not student.exists():
                slice_model(model, selection.change(), student, dtype=None)
            say(name, method, ratio, *before_and_after(config, folder, student, teacher))


def main() -> None:
    logs.start()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="for text and models")
    parser.add_argument("--models", nargs="+", default=["delta_net", "gated_deltanet"])
    parser.add_argument("--out", type=Path, help="file that gets a line of JSON per row")
    arguments = parser.parse_args()
    config = load_config(CONFIG)
    print("| model | method | pruned | perplexity | recovered |\n|---|---|---|---|---|", flush=True)

    def say(model: str, method: str, ratio: float, before: float, after: float) -> None:
        print(f"| {model} | {method} | {ratio:.0%} | {before:.1f} | {after:.1f} |", flush=True)
        if arguments.out:
            row = {"model": model, "method": method, "ratio": ratio}
            with open(arguments.out, "a") as file:
                file.write(json.dumps({**row, "before": before, "after": after}) + "\n")

    for name in arguments.models:
        compare(config, name, arguments.folder, say)


if __name__ == "__main__":
    main()
