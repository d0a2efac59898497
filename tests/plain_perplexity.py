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

import tokenizers
import torch
import torch.nn.functional as F
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from safetensors.torch import load_file

TOKENS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 19}
LOGITS_AT_ONCE = 1 << 11


class PlainModel:
    """The weights of a model folder, rounded to `dtype` and then computed with in float64."""

    def __init__(self, folder, dtype=torch.float32, device="cpu"):
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.device = device
        self.weights = {
            name: tensor.to(dtype).to(device, torch.float64)
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True
        special = json.loads((folder / "tokenizer_config.json").read_text())
        self.first = self.tokenizer.token_to_id(special.get("bos_token") or special["eos_token"])

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def hidden(self, ids):
        """ids: (B, T) to what the output matrix reads: (B, T, hidden)."""
        p, eps = self.weights, self.config["norm_eps"]
        x = p["model.embeddings.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            w = {name.removeprefix(at): p[name] for name in p if name.startswith(at)}
            x = x + self.mixer(w, norm(x, w["attn_norm.weight"], eps))
            h = norm(x, w["mlp_norm.weight"], eps)
            h = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
            x = x + h @ w["mlp.down_proj.weight"].T
        return norm(x, p["model.norm.weight"], eps)

    def mixer(self, w, x):
        B, T, _ = x.shape
        heads = self.config["num_heads"]
        value_heads = self.config.get("num_v_heads") or heads
        q, k, v = (convolved(x @ w[f"attn.{n}_proj.weight"].T, w[f"attn.{n}_conv1d.weight"])
                   for n in "qkv")  # fmt: skip
        q, k = (
            unit(z.view(B, T, heads, -1)).repeat_interleave(value_heads // heads, 2) for z in (q, k)
        )
        v = v.view(B, T, value_heads, -1)
        beta = torch.sigmoid(x @ w["attn.b_proj.weight"].T)  # (B, T, heads)
        decay = torch.ones_like(beta)
        if "attn.A_log" in w:
            step = F.softplus(x @ w["attn.a_proj.weight"].T + w["attn.dt_bias"])
            decay = torch.exp(-torch.exp(w["attn.A_log"]) * step)

        S = x.new_zeros(B, value_heads, v.shape[-1], k.shape[-1])  # d_v x d_k, as in the paper
        o = torch.empty_like(v)
        for t in range(T):
            S = decay[:, t, :, None, None] * S
            error = v[:, t, :, :, None] - S @ k[:, t, :, :, None]
            S = S + (beta[:, t, :, None, None] * error) * k[:, t, :, None, :]
            o[:, t] = (S @ q[:, t, :, :, None])[..., 0]
        o = norm(o * k.shape[-1] ** -0.5, w["attn.o_norm.weight"], self.config["norm_eps"])
        if "attn.g_proj.weight" in w:
            o = o * F.silu(x @ w["attn.g_proj.weight"].T).view_as(o)
        return o.reshape(B, T, -1) @ w["attn.o_proj.weight"].T

    def logits(self, hidden):
        head = self.weights.get("lm_head.weight", self.weights["model.embeddings.weight"])
        return hidden @ head.T

    @torch.no_grad()
    def scores(self, rows):
        """Of (ids, n): the log-likelihood of the last n, and whether each is the likeliest."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        found = {}
        while len(found) < len(rows):
            longest = len(rows[order[len(found)]][0])
            count = max(1, TOKENS_AT_ONCE[self.device] // longest)
            chosen = order[len(found) : len(found) + count]
            ids = torch.zeros(len(chosen), longest, dtype=torch.long)
            for row, i in enumerate(chosen):
                ids[row, : len(rows[i][0])] = torch.tensor(rows[i][0])
            ids = ids.to(self.device)
            hidden = self.hidden(ids)
            for row, i in enumerate(chosen):
                end = len(rows[i][0])
                places = torch.arange(end - rows[i][1], end, device=self.device)
                found[i] = self.score(hidden[row], ids[row], places)
        return [found[i] for i in range(len(rows))]

    def score(self, hidden, ids, places):
        total, best = 0.0, True
        for some in places.split(LOGITS_AT_ONCE):
            logits = self.logits(hidden[some - 1])
            likelihoods = F.log_softmax(logits, -1).gather(-1, ids[some, None])
            total += float(likelihoods.sum())
            best &= bool((logits.argmax(-1) == ids[some]).all())
        return total, best


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(x, filters):
    """x: (B, T, channels); filters: (channels, 1, W), or fewer that neighbours share."""
    filters = filters[:, 0].repeat_interleave(x.shape[-1] // len(filters), 0)
    padded = F.pad(x, (0, 0, filters.shape[1] - 1, 0))
    return F.silu(
        sum(padded[:, i : i + x.shape[1]] * filters[:, i] for i in range(filters.shape[1]))
    )


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
    return math.exp(-sum(total for total, _ in model.scores(rows)) / words)


def lambada(model, path, window):
    """exp of the nats of a last word, and how often greedy decoding would say it."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").strip().split("\n"):
        text = json.loads(line)["text"]
        ids = model.encode(text)
        seen = len(model.encode(text[: text.rindex(" ")].rstrip()))
        rows.append((ids[-window - 1 :], len(ids) - seen))
    scores = model.scores(rows)
    return (
        math.exp(-sum(total for total, _ in scores) / len(scores)),
        sum(best for _, best in scores) / len(scores),
    )
