"""What batching and the recurrent state are worth in evaluation.

    python benchmarks/evaluation.py [--model FOLDER] [--prompts N] [--length TOKENS]

Retrieval is a long prompt and a short answer. Keycut reads the prompt once and goes on from the
recurrent state; the other way reads prompt and answer again for each token. Zero-shot tasks are
many short requests: those of the found batch size are timed against one at a time. Prompts are
random tokens, of lengths that vary by a third. Without --model a random DeltaNet of the demo's
size is used.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from keycut.data.documentation import documentation
from keycut.data.tokenizer import train_tokenizer
from keycut.evaluation.language_model import LanguageModel
from keycut.models import create, save

ANSWER = 48
CHOICES, CHOICE_LENGTH = 200, 40  # requests of a zero-shot task, and their tokens


def random_model(folder: Path) -> Path:
    """DeltaNet as in config/demo.yaml, untrained: its speed is the same."""
    texts = (text for text, _ in zip(documentation(), range(2000), strict=False))
    train_tokenizer(texts, folder / "tokenizer", vocabulary_size=1024)
    config = {
        "model_type": "delta_net",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    }
    save(create(config, seed=0), folder / "model", tokenizer=folder / "tokenizer")
    return folder / "model"


@torch.inference_mode()
def recomputed(lm: LanguageModel, prompt: list[int]) -> None:
    """The whole prefix for every token."""
    ids = torch.tensor([prompt], device=lm.device)
    for _ in range(ANSWER):
        states = lm.model.model(ids, use_cache=False).last_hidden_state[:, -1]
        ids = torch.cat([ids, lm.model.lm_head(states).argmax(-1)[:, None]], 1)


def seconds(work: Callable[[], object], device: str) -> float:
    """The faster of two runs: the first may still compile kernels."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=2000, help="tokens of the longest prompt")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or random_model(Path(folder))
        dtype = torch.bfloat16 if device == "cuda" else None
        lm = LanguageModel(model, window=2048, device=device, dtype=dtype)
    draw = random.Random(0)

    def some(length: int) -> list[int]:
        return [int(draw.random() * lm.words.vocabulary_size) for _ in range(length)]

    lengths = [int(arguments.length * (1 - draw.random() / 3)) for _ in range(arguments.prompts)]
    prompts = [(some(length), ("\0",), ANSWER) for length in lengths]
    lm._finished = lambda ids, until, limit: "" if len(ids) == limit else None  # no early end

    def generate() -> None:
        lm._in_batches("generating", prompts, lambda prompt: len(prompt[0]), lm._continued)

    state = seconds(generate, device)
    prefix = seconds(lambda: [recomputed(lm, ids) for ids, _, _ in prompts], device)
    requests = [((), some(CHOICE_LENGTH // 2), some(CHOICE_LENGTH // 2)) for _ in range(CHOICES)]
    found = seconds(lambda: lm._loglikelihood_tokens(requests), device)
    lm.batch = 1
    single = seconds(lambda: lm._loglikelihood_tokens(requests), device)

    print(f"{device}, {torch.get_num_threads()} threads, {sum(lengths):,} tokens in prompts")
    print(f"  retrieval, {len(prompts)} prompts, {ANSWER} tokens each   times faster")
    print(f"    from the recurrent state  {state:9.2f} s   {prefix / state:8.1f}")
    print(f"    from the whole prefix     {prefix:9.2f} s")
    print(f"  zero-shot, {CHOICES} requests of {CHOICE_LENGTH} tokens")
    print(f"    at the found batch size   {found:9.2f} s   {single / found:8.1f}")
    print(f"    one at a time             {single:9.2f} s")


if __name__ == "__main__":
    main()
