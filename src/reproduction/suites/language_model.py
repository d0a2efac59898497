"""A model folder as a language model of lm-eval.

Same results as lm-eval's own HFLM (windows, truncation on the left, the token before a text), which
computes the logits of every position and leaves generation to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor
from torch.nn.functional import cross_entropy

from reproduction.generation import generate
from statecut.data.progress import Progress
from statecut.data.tokenizer import load_tokenizer
from statecut.errors import InputError
from statecut.models.checkpoint import load

# Tokens of a batch whose size is not given. A CPU gains nothing beyond this; a GPU starts here
# and halves them until they fit into its memory.
TOKENS_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 17}
LOGITS_AT_ONCE = 1 << 11  # positions; those of a vocabulary of 32,000 are 250 MB
# Widths of batches are multiples of this. On a GPU fla tunes its norms again, for seconds, for
# every count of some thousand tokens: batches should have few sizes. Its chunks have 64 tokens.
GRAIN = {"cpu": 1, "cuda": 64}


class LanguageModel(TemplateLM):
    """A model folder, scored and continued at most `window` tokens at a time."""

    def __init__(
        self,
        folder: Path | str,
        window: int,
        batch: int | None = None,  # requests in one; by default as many as fit
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = load_tokenizer(folder)
        self._device = torch.device(device)
        self.model = load(folder, dtype=dtype, device=self._device)
        self.window, self.batch = window, batch
        self.tokens_at_once = TOKENS_AT_ONCE[self._device.type]
        self.grain = GRAIN[self._device.type]
        self.non_finite = False  # whether a logit was ever NaN or infinite

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: bos, or eos where there is no bos."""
        return self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: Any = None, **_: Any) -> list[int]:
        return self.tokenizer.encode(string).tolist()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> Any:
        """Windows of all documents are scored together, and summed by document."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        windows = [
            (number, *utils.make_disjoint_window(pair))
            for number, ids in enumerate(texts)
            for pair in utils.get_rolling_token_windows(ids, self.prefix_token_id, self.window, 1)
        ]
        sums = [0.0] * len(requests)
        for window, (score, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[window[0]] += score
        return sums

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[Any]:
        """(key, context, continuation) to (log-likelihood, whether greedy decoding gives it)."""
        rows = []
        for _, context, scored in requests:
            if not 0 < len(scored) <= self.window:
                raise InputError(
                    f"a text of {len(scored)} tokens cannot be scored in a window of "
                    f"{self.window}: {self.tokenizer.backend.decode(scored)[-80:]!r}"
                )
            rows.append(((context + scored)[-self.window - 1 :], len(scored)))
        return self._in_batches("scoring", rows, lambda row: len(row[0]) - 1, self._scores)

    @torch.inference_mode()
    def _scores(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Rows of tokens, of which the last n are scored."""
        # Padding is on the right, where nothing that is scored can see it: any token will do.
        inputs = self._padded([ids[:-1] for ids, _ in rows], "right")
        hidden = self.model.model(inputs, use_cache=False).last_hidden_state
        ends = [(len(ids) - 1 - n, len(ids) - 1) for ids, n in rows]
        wanted = torch.cat([row[slice(*end)] for row, end in zip(hidden, ends, strict=True)])
        targets = torch.tensor([token for ids, n in rows for token in ids[-n:]])
        slices = wanted.split(LOGITS_AT_ONCE), targets.to(self._device).split(LOGITS_AT_ONCE)
        scores, greedy = [], []
        for states, truth in zip(*slices, strict=True):
            logits, best = self._logits(states)
            scores.append(-cross_entropy(logits, truth, reduction="none"))
            greedy.append(best == truth)
        # Summed in float64: a document has thousands of tokens.
        parts = (torch.cat(scores).double(), torch.cat(greedy))
        by_row = (part.cpu().split([n for _, n in rows]) for part in parts)
        return [(float(score.sum()), bool(hit.all())) for score, hit in zip(*by_row, strict=True)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        prompts = []
        for request in requests:
            text, settings = request.args
            limit = settings["max_gen_toks"]
            ids = self.tok_encode(text)[limit - self.window :] or [self.prefix_token_id]
            prompts.append((ids, tuple(settings["until"]), limit))
        return self._in_batches(
            "generating", prompts, lambda prompt: len(prompt[0]) + prompt[2], self._continued
        )

    @torch.inference_mode()
    def _continued(self, prompts: Sequence[tuple[list[int], tuple[str, ...], int]]) -> list[str]:
        """The prompts once, then one token at a time from the recurrent state."""
        rows = [ids for ids, _, _ in prompts]
        if self.grain > 1 and (missing := -sum(map(len, rows)) % self._width(max(map(len, rows)))):
            # Kernels see what the mask leaves: one more row rounds the count of tokens up.
            rows.append([self.prefix_token_id] * missing)
        # Padded on the left, so that all end together; the mask keeps the padding out of the state.
        inputs, mask = (self._padded(x, "left") for x in (rows, [[1] * len(ids) for ids in rows]))
        texts: list[str | None] = [None] * len(prompts)
        written: list[list[int]] = [[] for _ in prompts]
        for tokens in self._tokens(inputs, None if mask.all() else mask):
            for row, (_, until, limit) in enumerate(prompts):
                if texts[row] is None:
                    written[row].append(tokens[row])
                    texts[row] = self._finished(written[row], until, limit)
            if all(text is not None for text in texts):
                break
        return [text for text in texts if text is not None]

    def _tokens(self, ids: Tensor, mask: Tensor | None) -> Iterator[list[int]]:
        """The tokens that follow rows of ids (B, T): the first of each, then the second, ..."""
        out = self.model.model(ids, attention_mask=mask, use_cache=True)
        best, state = self._logits(out.last_hidden_state[:, -1])[1], out.past_key_values
        del out  # and with it the hidden states of all prompts
        yield best.tolist()
        for tokens, logits in generate(self.model, state, best[:, None], mask):
            self.non_finite |= not bool(logits.isfinite().all())
            yield tokens[:, 0].tolist()

    def _width(self, longest: int) -> int:
        return -(-longest // self.grain) * self.grain

    def _padded(self, rows: Sequence[list[int]], side: str) -> Tensor:
        """Rows as (B, T), with zeros on one side."""
        width = self._width(max(map(len, rows)))
        zeros = ([0] * (width - len(row)) for row in rows)
        pairs = zip(zeros, rows, strict=True) if side == "left" else zip(rows, zeros, strict=True)
        return torch.tensor([first + second for first, second in pairs], device=self._device)

    def _logits(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, hidden) to the logits (B, vocabulary) and the best token of each (B,)."""
        logits = self.model.lm_head(states).float()
        best = logits.max(-1)  # its index is argmax's, three times as fast on a CPU
        # Comparisons of NaN give answers that look like chance. The maximum of a row with one is
        # NaN, so the maxima are enough.
        self.non_finite |= not bool(best.values.isfinite().all())
        return logits, best.indices

    def _finished(self, ids: list[int], until: tuple[str, ...], limit: int) -> str | None:
        """The text without the string that ended it, or None if it goes on."""
        ended = ids[-1] == self.tokenizer.eos
        text = self.tokenizer.backend.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        stops = [text.index(stop) for stop in until if stop in text]
        return text[: min(stops, default=None)] if stops or ended or len(ids) == limit else None

    def _in_batches(
        self, work: str, items: Sequence[Any], length: Callable[[Any], int], compute: Any
    ) -> list[Any]:
        """compute() of all items, in their order. The longest are computed first, so that items of
        a batch have similar lengths, and too large a batch shows at once."""
        order = sorted(range(len(items)), key=lambda i: -length(items[i]))
        progress = Progress(work, tokens=sum(map(length, items)))
        results: dict[int, Any] = {}
        while len(results) < len(items):
            longest = length(items[order[len(results)]])
            size = self.batch or max(1, self.tokens_at_once // self._width(longest))
            chosen = order[len(results) : len(results) + size]
            may_shrink = self.batch is None and len(chosen) > 1
            computed = None
            # Not in an `except` block: an error refers to its frames, and so keeps their memory.
            with suppress(torch.OutOfMemoryError):
                computed = compute([items[i] for i in chosen])
            if computed is None and not may_shrink:
                raise InputError(
                    f"{work}: {len(chosen)} x {longest} tokens do not fit into the GPU's memory; "
                    "give the suite a smaller batch or window"
                )
            if computed is None:
                self.tokens_at_once = len(chosen) * self._width(longest) // 2
                torch.cuda.empty_cache()
                continue
            results.update(zip(chosen, computed, strict=True))
            progress.add(documents=len(chosen), tokens=sum(length(items[i]) for i in chosen))
        return [results[i] for i in range(len(items))]
