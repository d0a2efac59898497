"""Which words does a cut forget? The loss of rare words that came before in the text, and others.

    python benchmarks/repeated.py --gpu --models WHOLE CUT ... --text T --out rows.jsonl
    python benchmarks/repeated.py --rows rows.jsonl --table                       as Markdown

Models are folders: an unpruned one first, then what was cut from it. Text is a folder of packed
tokens (`statecut pack`). Without --gpu it runs on a CPU. A token is rare if the text has it at most
once in 1,000 tokens, and repeated if its sequence has had it. A row of JSON per cut model is
written as soon as it is known: of each kind of token, by how much its loss is above the unpruned
model's (in nats, with its standard error over sequences). Models that are in the file already are
not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from rows import LABELS, Row, append_rows, device_of, existing, markdown, new_parser, read_rows
from torch import Tensor

from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.models.checkpoint import Checkpoint, load
from statecut.record import Record

RARE = 1000
KINDS = ("rare, repeated", "rare, new", "common")
BATCH = 4


def kinds(ids: Tensor) -> dict[str, Tensor]:
    """Of (sequences, length) tokens: which from the second on are of each kind."""
    rare = ids.flatten().bincount()[ids[:, 1:]] * RARE <= ids.numel()
    earlier = torch.zeros_like(rare)
    for sequence, marks in zip(ids.tolist(), earlier, strict=True):
        seen = set[int]()
        for place, token in enumerate(sequence[1:]):
            seen.add(sequence[place])
            marks[place] = token in seen
    return dict(zip(KINDS, (rare & earlier, rare & ~earlier, ~rare), strict=True))


@torch.no_grad()
def losses(folder: str, ids: Tensor, device: str) -> Tensor:
    """(sequences, length - 1), in nats."""
    model = load(folder, device=device, dtype=Checkpoint(folder).compute_dtype(device))
    return torch.cat(
        [
            torch.nn.functional.cross_entropy(
                model(part.to(device), use_cache=False).logits[:, :-1].float().mT,
                part[:, 1:].to(device),
                reduction="none",
            ).cpu()
            for part in ids.split(BATCH)
        ]
    )


def rows(options: argparse.Namespace, device: str) -> Iterator[Row]:
    text = PackedTokens(options.text)
    ids = torch.from_numpy(text[: options.sequences]).long()
    marked = kinds(ids)
    if missing := [kind for kind, marks in marked.items() if not marks.any()]:
        raise InputError(f"{options.text}: no token is {missing[0]}; give more sequences")
    done = {row["folder"] for row in read_rows(options.out)}
    whole, *cut = options.models
    unpruned = losses(whole, ids, device)
    for folder in cut:
        if str(folder) in done:
            continue
        checkpoint = Checkpoint(folder)
        rise = losses(folder, ids, device) - unpruned
        row: Row = {"folder": str(folder), "model": checkpoint.architecture.model_type}
        row |= {"d_k": checkpoint.shape.width, "refitted": is_refitted(folder)}
        row["sequences"] = len(ids)
        for kind, marks in marked.items():
            by_sequence = (rise * marks).sum(1)
            mean = by_sequence.sum() / marks.sum()
            spread = (by_sequence - mean * marks.sum(1)).norm() / marks.sum()
            row[kind] = {"rise": mean.item(), "error": spread.item(), "tokens": int(marks.sum())}
        yield row


def is_refitted(folder: str) -> bool:
    refits = (entry.get("refit", {}) for entry in Record.read(folder).entries)
    return any(refit.get("written", True) for refit in refits if refit)


def table(rows: list[Row]) -> str:
    """In percent of perplexity."""
    counts = (f"{kind} ({rows[0][kind]['tokens']:,})" for kind in KINDS)
    return markdown(
        f"model, d_k | {' | '.join(counts)}",
        (
            (
                f"{LABELS.get(row['model'], row['model'])}, {row['d_k']}"
                + ", refitted" * row["refitted"],
                *(shown(**row[kind]) for kind in KINDS),
            )
            for row in rows
        ),
    )


def shown(rise: float, error: float, tokens: int) -> str:
    perplexity = torch.tensor(rise).exp().item()
    return f"{100 * (perplexity - 1):.1f} ± {100 * perplexity * error:.1f}"


def line(row: Row) -> str:
    return f"{row['folder']}: " + ", ".join(f"{kind} {shown(**row[kind])} %" for kind in KINDS)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", type=existing, nargs="+", metavar="FOLDER")
    parser.add_argument("--text", type=existing, metavar="FOLDER")
    parser.add_argument("--sequences", type=int, help="of the text (default: all)")
    options = parser.parse_args()
    if options.table:
        print(table(read_rows(*options.rows)))
        return
    device = device_of(parser, options, "models", "text")
    if len(options.models) < 2:
        parser.error("--models: give the unpruned model and what was cut from it")
    append_rows(options.out, rows(options, device), line)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
