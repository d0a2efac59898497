"""Generation that replays one captured step, against launching every step from Python, on a GPU.

    python benchmarks/generation.py [--model NAME] [--width N]      random weights, random prompts
    python benchmarks/generation.py --folder MODEL                  a model folder, prompts of text

Both begin with the same state and must write the same tokens. Timed is what comes after a prompt,
capture included, as the evaluation pays it for every batch of prompts, with the tokens read after
each step to see whether a text has ended; of two runs the second, since the first compiles.
Then there is no memory for a graph: steps have to be launched, and tokens to be the same. Ends with
1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from arguments import existing

from reproduction.config import load_config

PAPER = Path(__file__).parents[1] / "config" / "paper.yaml"


def prompts(model: Any, folder: Path | None, batch: int, length: int) -> torch.Tensor:
    if folder is None:
        return torch.randint(0, model.config.vocab_size, (batch, length), device="cuda")
    from reproduction.documentation import documentation
    from statecut.data.tokenizer import load_tokenizer

    words, ids = load_tokenizer(folder), []
    for text in documentation():
        ids += list(words.encode(text))
        if len(ids) >= batch * length:
            break
    return torch.tensor(ids[: batch * length], device="cuda").view(batch, length)


def plain(going: Any, count: int) -> list[list[int]]:
    return [going.run(1)[0][:, 0].tolist() for _ in range(count)]


def replayed(going: Any, count: int) -> list[list[int]]:
    from reproduction.generation import generate

    steps = generate(going.model, going.state, going.last)
    return [tokens[:, 0].tolist() for tokens, _ in islice(steps, count)]


def timed(write: Callable[..., list[list[int]]], going: Any, count: int) -> tuple[Any, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    found = write(going, count)
    return found, time.perf_counter() - started


@torch.inference_mode()
def prompted(model: Any, ids: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """A generation after its prompts, and a copy of all that the next token depends on."""
    from reproduction.generation import GreedyGeneration

    out = model(ids, use_cache=True, logits_to_keep=1)
    going = GreedyGeneration(model, out.past_key_values, out.logits.argmax(-1))
    return going, [tensor.clone() for tensor in going.tensors()]


@torch.inference_mode()
def compare(model: Any, ids: torch.Tensor, count: int) -> bool:
    """One row of the table; whether the tokens are the same."""
    from reproduction.generation import put

    going, start = prompted(model, ids)
    found: dict[str, list[list[int]]] = {}
    seconds: dict[str, float] = {}
    for _ in range(2):
        for write in (plain, replayed):
            put(start, going.tensors())
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            found[write.__name__], seconds[write.__name__] = timed(write, going, count)
    held = torch.cuda.memory_allocated() - before
    same = found["plain"] == found["replayed"]
    agreeing = sum(a == b for a, b in zip(*found.values(), strict=True))
    cells = (len(ids), *(f"{len(ids) * count / seconds[way]:,.0f}" for way in seconds),
             f"{seconds['plain'] / seconds['replayed']:.1f} x", f"{agreeing} of {count}",
             len({token for step in found["plain"] for token in step}),
             f"{held / 2**20:.0f}")  # fmt: skip
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return same


@torch.inference_mode()
def refused(model: Any, ids: torch.Tensor, count: int) -> bool:
    """Whether there is no memory for a graph, and generation goes on as well."""
    from reproduction.generation import generate, is_free, memory_of, put

    going, start = prompted(model, ids)
    expected, step = memory_of(lambda: plain(going, count))
    put(start, going.tensors())
    steps = generate(model, going.state, going.last)
    found = [next(steps)[0][:, 0].tolist()]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + step + step // 8 + (32 << 20)  # for no second one
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total)
    missing = not is_free(step)
    found += [tokens[:, 0].tolist() for tokens, _ in islice(steps, count - 1)]
    torch.cuda.set_per_process_memory_fraction(1.0)
    same = found == expected
    print(f"\nno memory for a graph: {'the same' if same else 'OTHER'} tokens, batch {len(ids)}")
    return same and missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="delta_net_1.3B", help="its name in config/paper.yaml")
    parser.add_argument("--width", type=int, default=128, help="d_k of a model by name")
    parser.add_argument("--folder", type=existing, help="a model folder instead")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 16, 1], metavar="N")
    parser.add_argument("--prompt", type=int, default=64, help="tokens; fla's chunks begin at 65")
    parser.add_argument("--tokens", type=int, default=48, help="written for each prompt")
    options = parser.parse_args()
    models = load_config(PAPER).models
    if options.folder is None and options.model not in models:
        parser.error(f"--model {options.model}: {PAPER.name} has {', '.join(models)}")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU here")
    from reproduction.benchmarking.decoding import many_first
    from reproduction.benchmarking.passes import random_model
    from statecut.models import load

    if options.folder is None:
        model = random_model(models[options.model], options.width, "cuda").eval()
        name = f"{options.model}, d_k {options.width}, random weights"
    else:
        model = load(options.folder, dtype=torch.bfloat16, device="cuda")
        name = options.folder.name
    print(f"{name}, {torch.cuda.get_device_name()}, {options.tokens} tokens after a prompt of "
          f"{options.prompt}\n")  # fmt: skip
    print("| batch | plain, tokens/s | replayed, tokens/s | faster | same steps | distinct tokens "
          "| MiB left |\n|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    held = [
        compare(model, prompts(model, options.folder, batch, options.prompt), options.tokens)
        for batch in many_first(options.batches)
    ]
    ids = prompts(model, options.folder, max(options.batches), options.prompt)
    held.append(refused(model, ids, 6))
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
