"""WikiText's word perplexity and LAMBADA's perplexity and accuracy, written out once more.

A page of plain PyTorch that reads a folder with DeltaNet or Gated DeltaNet by itself and computes
one token after the other in float64. It shares no code with Statecut, lm-eval's requests,
flash-linear-attention or transformers, so that it can be held against them. Of lm-eval it takes
what a text is: how WikiText's spaces around punctuation are removed.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from plain_model import plain_logits
from safetensors.torch import load_file


class PlainModel:
    """The weights of a model folder, in float64."""

    def __init__(self, folder):
        weights = load_file(folder / "model.safetensors")
        doubles = {name: tensor.double() for name, tensor in weights.items()}
        self.config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
        self.named_parameters = doubles.items
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True
        special = json.loads((folder / "tokenizer_config.json").read_text())
        self.first = self.tokenizer.token_to_id(special.get("bos_token") or special["eos_token"])

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def score(self, ids, n):
        """The log-likelihood of the last n tokens, and whether each is the likeliest."""
        logits, truth = plain_logits(self, torch.tensor(ids[:-1]))[-n:], torch.tensor(ids[-n:])
        likelihoods = logits.log_softmax(-1).gather(-1, truth[:, None])
        return float(likelihoods.sum()), bool((logits.argmax(-1) == truth).all())


def pages(path):
    """WikiText's articles: each begins with a line that has one equals sign on either side."""
    found = [[]]
    for line in Path(path).read_text(encoding="utf-8").split("\n"):
        words = line.split()
        if len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2]):
            found.append([])
        found[-1].append(line)
    return [page for page in map("\n".join, found) if page.strip()]


def wikitext(model, path, window):
    """exp of nats per word. A page is cut into full windows; the last is moved back to be full as
    well, and scores only what none before it has."""
    rows, words = [], 0
    for page in pages(path):
        words += len(re.split(r"\s+", page))
        ids = [model.first, *model.encode(wikitext_detokenizer({"page": page}))]
        done = 1
        while done < len(ids):
            end = min(done + window, len(ids))
            rows.append((ids[max(0, end - window - 1) : end], end - done))
            done = end
    return math.exp(-sum(model.score(*row)[0] for row in rows) / words)


def lambada(model, path, window):
    """exp of the nats of a last word, and how often greedy decoding would say it."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").strip().split("\n"):
        text = json.loads(line)["text"]
        ids = model.encode(text)
        seen = len(model.encode(text[: text.rindex(" ")].rstrip()))
        rows.append((ids[-window - 1 :], len(ids) - seen))
    scores = [model.score(*row) for row in rows]
    return (
        math.exp(-sum(total for total, _ in scores) / len(scores)),
        sum(best for _, best in scores) / len(scores),
    )
