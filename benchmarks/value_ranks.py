"""Why one split of the state beats another: how much of keys and values the kept ones rebuild.

    python benchmarks/value_ranks.py MODEL [MODEL ...] --text FOLDER [--sequences 16]

For each model and for 1/2, 1/4 and 1/8 of the channels: the share of the energy that the channels
which DRRQR keeps cannot rebuild linearly, of keys and queries together and of what enters the
output projection, mean over heads; and the entropy rank of both. FOLDER is text that
`statecut pack` has packed with the models' tokenizer, of which the slice `calibration` is taken.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from arguments import existing
from torch import Tensor

from statecut.data.packing import PackedTokens
from statecut.models.checkpoint import Checkpoint
from statecut.pruning.calibration import calibrate_folder
from statecut.pruning.select import select
from statecut.pruning.statistics import ModelStatistics

PARTS = (2, 4, 8)


def not_rebuilt(gram: Tensor, kept: Tensor) -> float:
    """The share of a Gram matrix's trace that is left when the kept channels have explained what
    they can: the trace of the Schur complement."""
    dropped = torch.ones(len(gram), dtype=torch.bool)
    dropped[kept] = False
    across = gram[kept][:, dropped]
    explained = torch.linalg.lstsq(gram[kept][:, kept], across, driver="gelsd").solution
    left = gram.diagonal()[dropped] - (across * explained).sum(0)
    return float(left.clamp_min(0).sum() / gram.trace())


def entropy_rank(gram: Tensor) -> float:
    """exp of the entropy of the eigenvalues' shares, mean over heads."""
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    shares = values / values.sum(-1, keepdim=True)
    return float(torch.special.entr(shares).sum(-1).exp().mean())


def lines(folder: Path, options: argparse.Namespace) -> list[str]:
    model = Checkpoint(folder)
    calibration = calibrate_folder(
        folder, PackedTokens(options.text, slice_name="calibration"), name="calibration",
        sequences=options.sequences, rows=5000, seed=0, device="cpu", gradients=False, values=True,
    )  # fmt: skip
    statistics = ModelStatistics(model, calibration)
    keys, values = statistics.gram("k") + statistics.gram("q"), statistics.gram("v")
    shape = model.shape
    result = []
    for part in PARTS:
        (of_keys,) = select("drrqr", statistics, [shape.width // part])
        (of_values,) = select("drrqr", statistics, [shape.value_width // part], channels="value")
        left = [
            torch.tensor([
                not_rebuilt(gram, kept)
                for gram, kept in zip(grams.flatten(0, 1), channels.flatten(0, 1), strict=True)
            ]).mean()
            for grams, channels in (
                (keys, of_keys.tensors["kept"]), (values, of_values.tensors["values.kept"]),
            )
        ]  # fmt: skip
        result.append(f"| {folder.name} | 1/{part} | {left[0]:.3f} | {left[1]:.3f} |")
    ranks = [f"{entropy_rank(grams):.1f} of {grams.shape[-1]}" for grams in (keys, values)]
    return [*result, f"| {folder.name} | entropy rank | {ranks[0]} | {ranks[1]} |"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=existing, nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=existing, required=True, metavar="FOLDER")
    parser.add_argument("--sequences", type=int, default=16, help="of calibration text")
    options = parser.parse_args()
    print("| model | kept | of keys and queries | of values |\n|---|---|---|---|", flush=True)
    for folder in options.models:
        print("\n".join(lines(folder, options)), flush=True)


if __name__ == "__main__":
    main()
