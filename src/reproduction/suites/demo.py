"""The demo's tasks, made from its held-out text, each in the form of a real task."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from statecut.data.packing import PackedTokens
from statecut.data.tokenizer import Tokenizer, load_tokenizer
from statecut.errors import InputError
from statecut.files import atomic_write, canonical_json

CONTEXT = 50  # words: these and a sentence fit into the demo's window of 128 tokens
SENTENCE = range(12, 40)  # words of a sentence that is used
CHOICES = 4
PAIRS = 4
QUESTIONS = 200  # of a task: errors of some 0.03, and a second or two a model


def make_demo_tasks(
    tokens: Path | str, tokenizer: Path | str, out: Path | str, *, slice_name: str, force: bool
) -> None:
    """Write the folder `out`: one .jsonl per task, from one slice of a packed folder."""
    pages = list(_pages(PackedTokens(tokens, slice_name=slice_name), load_tokenizer(tokenizer)))
    rng = random.Random(0)
    tasks = {
        "demo_prose": [{"page": page} for page in pages],
        "demo_last_word": _some(list(_last_words(pages, rng)), rng),
        "demo_choice": _some(list(_choices(pages, rng)), rng),
        "demo_recall": list(_recall(pages, rng)),
    }
    with atomic_write(out, force=force, folder=True) as aside:
        for name, documents in tasks.items():
            if not documents:
                raise InputError(f"{tokens}: its slice {slice_name} is too small for {name}")
            (aside / f"{name}.jsonl").write_text("\n".join(map(canonical_json, documents)) + "\n")


def _some(documents: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """QUESTIONS of them, or all if they are fewer. Sampled with random(), which is the same in all
    versions of Python."""
    return sorted(documents, key=lambda _: rng.random())[:QUESTIONS]


def _pages(packed: PackedTokens, words: Tokenizer) -> Iterator[str]:
    """The documents of a slice as text; the last is cut off where the slice ends."""
    stream = packed[0 : len(packed)].ravel()
    ends = np.flatnonzero(stream == words.eos)
    for start, end in zip([0, *(ends + 1)], [*ends, len(stream)], strict=True):
        text = words.backend.decode(list(stream[start:end]))
        if len(text.split()) >= 8:
            yield text


def _sentences(pages: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Each sentence of a paragraph as words, and the words before it."""
    for page in pages:
        for paragraph in page.split("\n\n"):
            before: list[str] = []
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph):
                yield before, sentence.split()
                before = before + sentence.split()


def _last_words(pages: list[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    """A sentence up to a word of its second half; small models do not know the rare words that
    sentences end with."""
    for before, sentence in _sentences(pages):
        half = len(sentence) // 2
        last = half + int(rng.random() * half)
        if len(sentence) in SENTENCE and sentence[last].isalpha():
            yield {"text": " ".join([*before, *sentence[: last + 1]][-CONTEXT:])}


def _choices(pages: list[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    """The second half of a sentence, and the same with two pairs of its words exchanged: the first
    pair, the second, or both. So no choice is nearer to the others, and a model that ignores the
    order of words is right once in four times."""
    for before, sentence in _sentences(pages):
        if len(sentence) in SENTENCE:
            half = len(sentence) // 2
            words = sentence[half:]
            places = sorted(range(len(words)), key=lambda _: rng.random())
            first, second = places[:2], places[2:4]
            once = _exchanged(words, *first)
            wrong = [once, _exchanged(words, *second), _exchanged(once, *second)]
            choices = [" ".join(choice) for choice in wrong]
            gold = int(rng.random() * CHOICES)
            choices.insert(gold, " ".join(words))
            if len(set(choices)) == CHOICES:
                query = " ".join([*before, *sentence[:half]][-CONTEXT:])
                yield {"query": query, "choices": choices, "gold": gold}


def _exchanged(words: list[str], first: int, second: int) -> list[str]:
    changed = list(words)
    changed[first], changed[second] = words[second], words[first]
    return changed


def _recall(pages: list[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Pairs of words, then the first word of a pair again: the answer is its second."""
    known = sorted({word for page in pages for word in re.findall(r"\b[a-z]{4,8}\b", page)})
    for _ in range(QUESTIONS if len(known) >= 2 * PAIRS else 0):
        sampled: dict[str, None] = {}  # each word once, in the order of the draws
        while len(sampled) < 2 * PAIRS:
            sampled[known[int(rng.random() * len(known))]] = None
        words = list(sampled)
        pairs = list(zip(words[:PAIRS], words[PAIRS:], strict=True))
        key, value = pairs[int(rng.random() * PAIRS)]
        yield {
            "context": " ".join(f"The {first} is {second}." for first, second in pairs),
            "question": f"The {key} is",
            "answers": [value],
        }
