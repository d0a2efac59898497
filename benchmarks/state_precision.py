"""Fewer key channels, or the whole state in fewer bits? Perplexity at equal bytes of state.

    python benchmarks/state_precision.py --gpu --models M HALF QUARTER --text T --out rows.jsonl
    python benchmarks/state_precision.py --rows rows.jsonl --table                   as Markdown

Models are folders of flash-linear-attention's: an unpruned one and what was cut from it, as the
workflow makes them. Without --gpu it runs on a CPU. Text is a folder of packed tokens (`statecut
pack`) with the slice `held_out`, whose perplexity is computed. Engines hold the state in float32;
half or a quarter of its bytes is also the whole state in 16 or 8 bits. That is emulated as an
engine decodes: the recurrence, token by token, is computed in float32 and gives its output, and
what it leaves for the next token is rounded to the nearest number of the type. In 8 bits each head
has a scale, the smallest power of two with which its largest number fits; that is exact, so a
number that does not change is not rounded again. The scale's byte per head is not counted.

Each model is evaluated by its own kernels, with which the emulation in float32 must agree, and in
each type. A row of JSON per model and type is written as soon as it is known; those that are in the
file already are not computed again.

A token takes some fifteen small kernels a layer, whatever the number of sequences, so all of them
go at once: 2,048 tokens of 7 layers at 10 us a kernel are 2 s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from rows import LABELS, Row, append_rows, device_of, existing, markdown, new_parser, read_rows
from torch import Tensor

from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.evaluation.perplexity import perplexity
from statecut.models import plain_kernels
from statecut.models.checkpoint import Checkpoint
from statecut.models.fixes.fla import plain_kernels_in_place

TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
OWN_KERNELS = "own kernels"
KEY = ("folder", "state")


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


def measure(checkpoint: Checkpoint, state: str, ids: Tensor, device: str) -> Row:
    """The perplexity of a model whose states are held in a type, and their bytes a sequence."""
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


# The rows


def rows(options: argparse.Namespace, device: str) -> Iterator[Row]:
    done = {tuple(row[key] for key in KEY) for row in read_rows(options.out)}
    text = PackedTokens(options.text, slice_name="held_out")
    ids = torch.from_numpy(text[: options.sequences])
    for folder in options.models:
        checkpoint = Checkpoint(folder)
        shape, name = checkpoint.shape, checkpoint.architecture.model_type
        for state in (OWN_KERNELS, *options.states):
            if (str(folder), state) not in done:
                about = {"folder": str(folder), "model": name, "d_k": shape.width, "state": state}
                yield {**about, **measure(checkpoint, state, ids, device)}


SHOWN = ("float32", "bfloat16", "float8_e4m3")


def table(rows: list[Row]) -> str:
    """Perplexity (the share of the bytes of the unpruned model's state in float32)."""
    by_size = sorted(rows, key=lambda row: row["bytes"])  # the last of each model is unpruned
    whole = {row["model"]: row for row in by_size if row["state"] == OWN_KERNELS}
    lines: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        kept = row["d_k"] / whole[row["model"]]["d_k"]
        parts = whole[row["model"]]["bytes"] // row["bytes"]
        share = f"1/{parts}" if parts > 1 else "all"
        line = lines.setdefault((row["model"], row["state"]), {})
        if kept in line:
            raise InputError(f"{row['folder']}: the rows have another {row['model']} of this width")
        line[kept] = f"{row['perplexity']:,.2f} ({share})"
    columns = sorted({kept for line in lines.values() for kept in line}, reverse=True)
    return markdown(
        f"model | state held in | {' | '.join(f'{kept:.0%} of the keys' for kept in columns)}",
        (
            (LABELS.get(model, model), state, *(line.get(kept, "") for kept in columns))
            for (model, state), line in lines.items()
            if state in SHOWN
        ),
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", type=existing, nargs="+", metavar="FOLDER")
    parser.add_argument("--text", type=existing, metavar="FOLDER")
    parser.add_argument("--states", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--sequences", type=int, help="of the slice (default: all)")
    options = parser.parse_args()
    if options.table:
        print(table(read_rows(*options.rows)))
        return
    device = device_of(parser, options, "models", "text")
    for folder in options.models:
        if Checkpoint(folder).architecture.library != "fla.models":
            parser.error(f"--models {folder}: only models of flash-linear-attention are emulated")
    append_rows(options.out, rows(options, device), line)


def line(row: Row) -> str:
    return (
        f"{row['folder']} {row['state']}: {row['bytes']:,} bytes, "
        f"perplexity {row['perplexity']:.4f} ({row['seconds']} s)"
    )


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
