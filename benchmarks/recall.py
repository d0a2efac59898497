"""What does a smaller state forget? Associative recall against the number of key channels kept.

    python benchmarks/recall.py --gpu --folder WORK --out rows.jsonl
    python benchmarks/recall.py --rows benchmarks/h200/recall.jsonl \\
        benchmarks/h200/recall_eps.jsonl --table                                    as Markdown

A sequence lists pairs of a key and a value, then asks for keys in random order, each followed by
its value (multi-query associative recall): k1 v1 k2 v2 k3 v3 k2 v2 k1 v1 ... Small models learn to
give the answers, and are cut by each method to each width; in percent of answers that are right:

    sliced      as it is cut
    refitted    by statecut.pruning.refit
    recovered   sliced, and trained for --recover steps by statecut.recovery.training
    unpruned    before any cut

The loss is of the answers alone, since all other tokens are random: in training, in the gradients
of calibration, and in recovery its divergence from the unpruned model too. Refit is as ever.

--folder keeps the text, the trained models and the checkpoints of a training that was interrupted.
Rows that are in the file already are not computed again. Plain PyTorch takes the places of fla's
kernels on a GPU too: those are tuned anew for every width, which would take longer than the rest.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch
from rows import LABELS, Row, append_rows, device_of, markdown, new_parser, read_rows
from torch import Tensor

from reproduction.config.training import Recipe, Recovery
from reproduction.pretraining.pretrain import pretrain
from statecut import __version__, logs
from statecut.arguments import Eps
from statecut.data.packing import Manifest, PackedTokens
from statecut.data.sources import Source
from statecut.errors import InputError
from statecut.files import atomic_write, sha256, write_json
from statecut.models import kernels
from statecut.models.checkpoint import Checkpoint, create, load
from statecut.models.fixes.fla import plain_kernels_in_place
from statecut.models.loaded import Loaded
from statecut.pruning.calibration import Calibration, calibrate, sampled_sequences
from statecut.pruning.methods import method_named
from statecut.pruning.refit import refit, write_refitted
from statecut.pruning.select import select
from statecut.pruning.slicing import slice_model
from statecut.pruning.statistics import ModelStatistics
from statecut.recovery import training
from statecut.recovery.checkpoints import Output
from statecut.recovery.distillation import IGNORED, distillation_losses, next_tokens

MODELS = ("delta_net", "gated_deltanet")
METHODS = ("fisher", "drrqr", "grad", "l1", "s_wanda", "rand")
KEY = ("model", "seed", "method", "width", "recover", "eps")
# What defines the trained models, and the text.
SETTINGS: dict[str, Any] = {
    "layers": 2,
    "hidden": 128,
    "heads": 2,
    "head": 64,  # key channels before cutting
    "keys": 128,  # and as many values
    "length": 256,  # tokens of a sequence
    "pairs": [4, 8, 16, 32, 64],  # in a sequence, as many sequences of each
    "steps": 2000,
    "batch": 256,
    "epochs": 4,
    "rate": 3e-3,
    "sequences": 256,  # for calibration and refit
    "held_out": 128,  # sequences for each number of pairs
}


# The task


def draw(pairs: int, sequences: int, length: int, keys: int, random: np.random.Generator) -> Any:
    """(sequences, length) tokens: keys are 0 .. keys - 1, values keys .. 2 keys - 1.

    The keys of a sequence differ. They are asked for in rounds, all of them in each round. Of keys
    there are as many as pairs at least; the length is even, with room for an answer.
    """

    def permutations(n: int) -> np.ndarray:
        return random.permuted(np.tile(np.arange(n), (sequences, 1)), axis=1)

    rounds = -(-(length // 2 - pairs) // pairs)
    listed = np.tile(np.arange(pairs), (sequences, 1))
    order = np.concatenate([listed, *(permutations(pairs) for _ in range(rounds))], 1)
    order = order[:, : length // 2]
    ids = np.empty((sequences, length), "<u2")
    ids[:, 0::2] = np.take_along_axis(permutations(keys)[:, :pairs], order, 1)
    values = random.integers(keys, 2 * keys, (sequences, pairs))
    ids[:, 1::2] = np.take_along_axis(values, order, 1)
    return ids


def answers(ids: Tensor) -> Tensor:
    """The tokens of (batch, length) that answer a question, and IGNORED for all others."""
    keys = ids[:, 0::2].sort(1).values
    pairs = 1 + (keys.diff(dim=1) != 0).sum(1, keepdim=True)  # each key is listed once
    places = torch.arange(ids.shape[1], device=ids.device)
    return ids.where((places % 2 == 1) & (places > 2 * pairs), IGNORED)


def write_text(folder: Path) -> None:
    """Packed tokens with the slices pretraining, recovery, calibration and, for each number of
    pairs, held_out_N."""
    random = np.random.default_rng(0)
    length, keys, pairs = SETTINGS["length"], SETTINGS["keys"], SETTINGS["pairs"]

    def mixed(sequences: int) -> np.ndarray:
        each = -(-sequences // len(pairs))
        return np.concatenate([draw(n, each, length, keys, random) for n in pairs])

    parts = {
        "pretraining": mixed(-(-SETTINGS["steps"] * SETTINGS["batch"] // SETTINGS["epochs"])),
        "recovery": mixed(64 * SETTINGS["batch"]),
        "calibration": mixed(4 * SETTINGS["sequences"]),
        **{f"held_out_{n}": draw(n, SETTINGS["held_out"], length, keys, random) for n in pairs},
    }
    stops = np.cumsum([len(rows) for rows in parts.values()]).tolist()
    with atomic_write(folder, folder=True) as aside:
        file = aside / "tokens.bin"
        file.write_bytes(np.concatenate(list(parts.values())).tobytes())
        manifest = Manifest(
            sha256=sha256(file), dtype="uint16", tokens=stops[-1] * length, sequence_length=length,
            sequences=stops[-1],
            slices=dict(zip(parts, zip([0, *stops], stops, strict=False), strict=True)),
            vocabulary_size=2 * keys, tokenizer="none", tokenizer_digest="none", boundary="eos",
            source=Source("associative recall", "1"), seed=0, statecut=__version__,
        )  # fmt: skip
        write_json(aside / "manifest.json", asdict(manifest))


def answers_only(model: Any) -> Any:
    """The model, whose loss is now of the answers alone."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("labels") is not None:
            kwargs["labels"] = answers(kwargs["labels"])
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def losses_of_answers(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, targets: Tensor,
    temperature: float, weight: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`distillation_losses` of the tokens that have a target."""
    kept = targets != IGNORED
    student, teacher, known = (x[kept][None] for x in (hidden, teacher_hidden, targets))
    return distillation_losses(student, head, teacher, teacher_head, known, temperature, weight)


# The models


@dataclass(frozen=True)
class Bench:
    folder: Path  # what is kept
    device: str
    work: Path  # what is not

    def text(self, name: str) -> PackedTokens:
        return PackedTokens(self.folder / "text", slice_name=name)

    def config(self, model: str) -> dict[str, Any]:
        hidden, heads, width = (SETTINGS[name] for name in ("hidden", "heads", "head"))
        own = {
            "delta_net": {"expand_k": heads * width / hidden, "expand_v": 1.0},
            "gated_deltanet": {"head_dim": width, "expand_v": hidden / heads / width},
        }
        return {
            "model_type": model, "hidden_size": hidden, "num_heads": heads,
            "num_hidden_layers": SETTINGS["layers"], "intermediate_size": 2 * hidden,
            "vocab_size": 2 * SETTINGS["keys"], **own[model],
        }  # fmt: skip

    def training(self, part: str, steps: int, rate: float, seed: int) -> dict[str, Any]:
        return {
            "data": f"recall/{part}", "steps": steps, "batch": SETTINGS["batch"],
            "learning_rate": rate, "warmup": steps // 6, "floor": 0.1, "eps": 1e-8, "clip": 1.0,
            "seed": seed, "epochs": steps,
        }  # fmt: skip

    def trained(self, name: str, seed: int) -> Path:
        """The folder of an unpruned model, trained unless it is there."""
        folder = self.folder / f"{name}-{seed}"
        if not folder.exists():
            model = answers_only(create(self.config(name), seed=seed)).to(self.device)
            steps, rate = SETTINGS["steps"], SETTINGS["rate"]
            values = {"trainer": "builtin", **self.training("pretraining", steps, rate, seed)}
            output = Output(folder, checkpoints=self.folder / "checkpoints")
            pretrain(model, self.text("pretraining"), Recipe.model_validate(values), output)
        return folder

    def calibrate(self, folder: Path, seed: int) -> Calibration:
        model = load(
            folder, device=self.device, dtype=Checkpoint(folder).compute_dtype(self.device)
        )
        ids = sampled_sequences(self.text("calibration"), SETTINGS["sequences"], seed)
        return calibrate(
            Loaded(answers_only(model)), ids.split(32), device=self.device, seed=seed,
            provenance={"model_digest": Checkpoint(folder).digest()},
        )  # fmt: skip

    def refit(self, sliced: Path, folder: Path, seed: int) -> Path:
        ids = sampled_sequences(self.text("calibration"), SETTINGS["sequences"], seed)
        student, out = Checkpoint(sliced), self.work / "refitted"
        result = refit(student, Checkpoint(folder), ids, device=self.device, batch=32)
        write_refitted(student, result, out, force=True)
        return out

    def recover(self, student: Path, teacher: Path, steps: int, seed: int) -> Path:
        values = {
            **self.training("recovery", steps, SETTINGS["rate"], seed),
            "lora": {"rank": 16, "alpha": 32},
            "distillation": {"temperature": 2.0, "weight": 1.0},
        }
        output = Output(self.work / "recovered", checkpoints=self.work / "running", force=True)
        with patch.multiple(
            training,
            next_tokens=lambda ids: next_tokens(answers(ids)),
            distillation_losses=losses_of_answers,
        ):
            training.recover(
                student, teacher, self.text("recovery"),
                Recovery.model_validate(values).settings(), output, device=self.device,
            )  # fmt: skip
        return self.work / "recovered"

    @torch.no_grad()
    def accuracy(self, folder: Path) -> dict[int, float]:
        """The share of answers that are right, by the number of pairs; computed in float32."""
        model = load(folder, device=self.device, dtype=torch.float32)
        shares = {}
        for pairs in SETTINGS["pairs"]:
            ids = torch.from_numpy(self.text(f"held_out_{pairs}")[:]).to(self.device)
            logits = model(ids, use_cache=False).logits
            right = logits[:, 2 * pairs : -1 : 2].argmax(-1) == ids[:, 2 * pairs + 1 :: 2]
            shares[pairs] = right.double().mean().item()
        return shares


def rows(bench: Bench, options: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict]:
    """One for each unpruned model, then one for each cell; those that are not done."""
    full = SETTINGS["head"]
    for seed in options.seeds:
        for name in options.models:
            folder = bench.trained(name, seed)
            if (name, seed, None, full, None, None) not in done:
                start = time.monotonic()
                values = {"unpruned": bench.accuracy(folder)}
                yield row((name, seed, None, full, None, None), values, start)
            pending = [
                (width, method, eps)
                for width in options.widths
                for method in options.methods
                for eps in options.eps
                if (name, seed, method, width, options.recover, eps) not in done
            ]
            calibration = bench.calibrate(folder, seed) if pending else None
            for width, method, eps in pending:
                start = time.monotonic()
                teacher, sliced = Checkpoint(folder), bench.work / "sliced"
                statistics = ModelStatistics(teacher, calibration)
                (selection,) = select(method, statistics, [width], target="kq", seed=seed)
                slice_model(teacher, selection.change(), sliced, dtype=None, eps=eps, force=True)
                stages = {"sliced": sliced, "refitted": bench.refit(sliced, folder, seed)}
                if options.recover:
                    stages["recovered"] = bench.recover(sliced, folder, options.recover, seed)
                values = {stage: bench.accuracy(path) for stage, path in stages.items()}
                yield row((name, seed, method, width, options.recover, eps), values, start)


def row(key: tuple[Any, ...], values: dict[str, Any], start: float) -> dict[str, Any]:
    seconds = round(time.monotonic() - start, 1)
    return {**dict(zip(KEY, key, strict=True)), "accuracy": values, "seconds": seconds}


def line(row: Row) -> str:
    stages = (
        f"{stage} {' · '.join(map(percent, s.values()))}" for stage, s in row["accuracy"].items()
    )
    names = " ".join(str(row[key]) for key in (*KEY[:4], "eps") if row[key] is not None)
    return f"{names}: {', '.join(stages)} ({row['seconds']} s)"


def percent(share: float) -> str:
    return f"{100 * share:.0f}"


# --- what the documents show ---

EPS = {"kept": "kept", "matched": "exact"}
CUTS, PAIRS = (32, 16), ("16", "64")


def table(trainings: list[list[Row]]) -> str:
    """Percent right, sliced / refitted / sliced and recovered; a training for each file."""
    found = {
        (number, row["model"], row["method"], row["width"], row["eps"]): row["accuracy"]
        for number, rows in enumerate(trainings, start=1)
        for row in rows
    }

    def cells(number: int, model: str, method: str, eps: str) -> Iterator[str]:
        for width, pairs in product(CUTS, PAIRS):
            stages = found[number, model, method, width, eps].values()
            yield " / ".join(percent(shares[pairs]) for shares in stages)

    numbers = range(1, len(trainings) + 1)
    return markdown(
        "model, training | method, eps | "
        + " | ".join(f"{width} kept, {pairs} pairs" for width in CUTS for pairs in PAIRS),
        (
            (f"{LABELS[model]}, {number}", f"{method_named(method).label}, {EPS[eps]}",
             *cells(number, model, method, eps))
            for model, number, method, eps in product(MODELS, numbers, METHODS, get_args(Eps))
            if all((number, model, method, width, eps) in found for width in CUTS)
        ),
    )  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="keeps text and trained models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--eps", nargs="+", choices=get_args(Eps), default=["matched"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 16, 8, 4, 2], help="kept")
    parser.add_argument("--recover", type=int, default=100, metavar="STEPS", help="0: not")
    options = parser.parse_args()
    if options.table:
        print(table([read_rows(file) for file in options.rows]))
        return
    device = device_of(parser, options, "folder")
    for width in options.widths:
        if not 1 <= width < SETTINGS["head"]:
            parser.error(f"--widths {width}: must lie in 1..{SETTINGS['head'] - 1}")
    for method in options.methods:
        method_named(method)
    kernels.prepare()
    if not (options.folder / "text").exists():
        write_text(options.folder / "text")
    done = {tuple(row[key] for key in KEY) for row in read_rows(options.out)}
    with tempfile.TemporaryDirectory() as work, plain_kernels_in_place():
        bench = Bench(options.folder, device, Path(work))
        append_rows(options.out, rows(bench, options, done), line)


if __name__ == "__main__":
    logs.start()
    for name in ("refit", "training.recovery"):  # several lines for each cell
        logging.getLogger(f"statecut.{name}").setLevel(logging.WARNING)
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
