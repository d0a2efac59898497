"""Fewer key channels, or the whole state in fewer bits? Perplexity at equal bytes of state.

    python benchmarks/state_precision.py --gpu --models M1 M2 --text T --out rows.jsonl
    python benchmarks/state_precision.py --models M --text T --out rows.jsonl           on a CPU
    python benchmarks/state_precision.py --rows rows.jsonl --table                   as Markdown

Models are folders of unpruned ones of flash-linear-attention. Text is a folder of packed tokens
(`statecut pack`) with slices `calibration`, for selection and refit, and `held_out`, whose
perplexity is computed. Engines hold the state in float32; half or a quarter of its bytes is also
the whole state in 16 or 8 bits. That is emulated as an engine decodes: the recurrence, token by
token, is computed in float32 and gives its output, and what it leaves for the next token is rounded
to the nearest number of the type. In 8 bits each head has a scale, the smallest power of two with
which its largest number fits; that is exact, so a number that does not change is not rounded again.
The scale's byte per head is not counted.

Whole models are evaluated in each type, and by their own kernels, with which the emulation in
float32 must agree; cut models sliced in float32, and refitted in each type. Apart from the own
kernels all go through the same recurrence. A row of JSON per cell is written as soon as it is
known; those that are in the file already are not computed again.

A token takes some fifteen small kernels a layer, whatever the number of sequences, so all of them
go at once: 2,048 tokens of 7 layers at 10 us a kernel are 2 s a cell.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from exact import Bench, chosen
from rows import Row, append_rows, device_of, existing, markdown, new_parser, read_rows
from torch import Tensor

from statecut.arguments import width as width_of
from statecut.errors import InputError
from statecut.evaluation.perplexity import perplexity
from statecut.models import plain_kernels
from statecut.models.checkpoint import Checkpoint
from statecut.models.fixes.fla import plain_kernels_in_place
from statecut.pruning.methods import method_named

TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
OWN_KERNELS = "own kernels"
KEY = ("model", "method", "ratio", "stage", "state")

Cell = tuple[str, str | None, float, str, str]


# The emulation


def rounded(state: Tensor, dtype: torch.dtype) -> Tensor:
    """A state (..., d_k, d_v) in float32 as it is when it was held in a type."""
    if dtype.itemsize > 1:
        return state.to(dtype).to(state.dtype)
    share = state.abs().amax((-2, -1), keepdim=True) / torch.finfo(dtype).max
    scale = torch.ldexp(torch.ones_like(share), torch.frexp(share).exponent)
    return (state / scale).to(dtype).to(state.dtype) * scale


def delta_rule_held_in(dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """`statecut.models.delta_rule.recurrent_delta_rule` with the state rounded between tokens."""

    def rule(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        B, T, H, _ = v.shape
        if g.ndim == 3:
            g = g[..., None]
        # (T, B H, 1, ...): what a token brings is one block of memory.
        q, k, v, beta, g = (
            x.movedim(1, 0).reshape(T, B * H, 1, -1) for x in (scale * q, k, v, beta, g)
        )
        decay = g.exp().mT  # (T, B H, 1 or d_k, 1)
        state = state.flatten(0, 1)
        outputs = torch.empty_like(v)
        for t in range(T):
            state = state * decay[t]
            u = beta[t] * (v[t] - k[t] @ state)
            state = torch.baddbmm(state, k[t].mT, u)
            outputs[t] = q[t] @ state
            state = rounded(state, dtype)
        return outputs.view(T, B, H, -1).movedim(0, 1), state.unflatten(0, (B, H))

    return rule


@contextmanager
def states_held_in(dtype: torch.dtype) -> Iterator[None]:
    """While open, the delta rules of fla's layers are the emulation."""
    rule = delta_rule_held_in(dtype)
    with (
        plain_kernels_in_place(),
        patch.object(plain_kernels, "chunked_delta_rule", rule),
        patch.object(plain_kernels, "recurrent_delta_rule", rule),
    ):
        yield


def measure(folder: Path, state: str, ids: Tensor, device: str) -> Row:
    """The perplexity of a model whose states are held in a type, and their bytes a sequence."""
    checkpoint = Checkpoint(folder)
    start = time.perf_counter()
    if state == OWN_KERNELS:
        value = perplexity(checkpoint, ids, device=device)
    else:
        with states_held_in(TYPES[state]):
            value = perplexity(checkpoint, ids, device=device, batch=len(ids))
    itemsize = 4 if state == OWN_KERNELS else TYPES[state].itemsize
    return {
        "perplexity": value,
        "bytes": checkpoint.shape.state_bytes(itemsize),
        "seconds": round(time.perf_counter() - start, 1),
    }


# The cells


def cells(name: str, options: argparse.Namespace) -> Iterator[Cell]:
    """All of a model: whole, then cut by each method and ratio."""
    for state in (OWN_KERNELS, *options.states):
        yield name, None, 0.0, "whole", state
    for ratio, method in itertools.product(options.ratios, options.methods):
        if "float32" in options.states:
            yield name, method, ratio, "sliced", "float32"
        for state in options.states:
            yield name, method, ratio, "refitted", state


def rows(options: argparse.Namespace, bench: Bench, done: set[Cell]) -> Iterator[Row]:
    held_out = bench.texts()["held_out"][: options.held_out]
    for folder in options.models:
        pending = [cell for cell in cells(folder.name, options) if cell not in done]
        teacher, statistics = Checkpoint(folder), None
        for (method, ratio), group in itertools.groupby(pending, lambda cell: cell[1:3]):
            folders = {"whole": folder}
            if method is not None:
                if statistics is None:
                    statistics = bench.statistics(folder, options.methods, values=False)
                whole = teacher.shape.width, teacher.shape.value_width
                split = width_of(whole[0], ratio), whole[1]
                channels = chosen(method, statistics, split, whole, options.seed)
                folders["sliced"] = bench.cut(teacher, channels, "exact", 1.0)
                folders["refitted"] = bench.refit(folders["sliced"], teacher)
            for cell in group:
                *_, stage, state = cell
                values = measure(folders[stage], state, held_out, bench.device)
                yield {**dict(zip(KEY, cell, strict=True)), **values}


LABELS = {"delta_net_40M": "DeltaNet", "gated_deltanet_40M": "Gated DeltaNet"}


def table(rows: list[Row]) -> str:
    """Perplexity (the share of the bytes of the whole state in float32): all channels, and what
    Fisher keeps of them, refitted."""
    whole = {row["model"]: row["bytes"] for row in rows if row["state"] == OWN_KERNELS}
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        if row["method"] in (None, "fisher") and row["stage"] != "sliced":
            parts = whole[row["model"]] // row["bytes"]
            share = f"1/{parts}" if parts > 1 else "all"
            line = cells.setdefault((row["model"], row["state"]), {})
            line[row["ratio"]] = f"{row['perplexity']:,.2f} ({share})"
    ratios = sorted({ratio for line in cells.values() for ratio in line})
    return markdown(
        f"model | state held in | {' | '.join(f'{1 - ratio:.0%} of the keys' for ratio in ratios)}",
        (
            (LABELS.get(model, model), state, *(line[ratio] for ratio in ratios))
            for (model, state), line in cells.items()
            if state in ("float32", "bfloat16", "float8_e4m3")
        ),
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", type=existing, nargs="+", metavar="FOLDER")
    parser.add_argument("--text", type=existing, metavar="FOLDER")
    parser.add_argument("--states", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--methods", nargs="+", default=["drrqr", "fisher"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--seed", type=int, default=0, help="of calibration text")
    parser.add_argument("--sequences", type=int, default=128, help="for selection and refit (128)")
    parser.add_argument("--held-out", type=int, default=64, help="sequences evaluated (64)")
    options = parser.parse_args()
    if options.table:
        print(table(read_rows(*options.rows)))
        return
    device = device_of(parser, options, "models", "text")
    for method in options.methods:
        method_named(method)
    for folder in options.models:
        if Checkpoint(folder).architecture.library != "fla.models":
            parser.error(f"--models {folder}: only models of flash-linear-attention are emulated")
    done: set[Any] = {tuple(row[key] for key in KEY) for row in read_rows(options.out)}
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options.text, [], device, options.sequences, options.seed, None, Path(work))
        append_rows(options.out, rows(options, bench, done), line)


def line(row: Row) -> str:
    cell = " ".join(str(row[key]) for key in KEY if row[key])
    return (
        f"{cell}: {row['bytes']:,} bytes, perplexity {row['perplexity']:.4f} ({row['seconds']} s)"
    )


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
