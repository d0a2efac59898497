"""The perplexity of text, with one layer of the model in memory at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from statecut.data.packing import PackedTokens
from statecut.models.checkpoint import Checkpoint, tied_weights
from statecut.models.layerwise import LayerwiseModel

logger = logging.getLogger(__name__)

EMBEDDINGS = ("model.embeddings.weight", "model.embed_tokens.weight")


def embedding(checkpoint: Checkpoint) -> Tensor:
    """As it is stored."""
    (name,) = (stored for current, stored in checkpoint.stored.items() if current in EMBEDDINGS)
    return checkpoint.tensor(name)


def perplexity(
    checkpoint: Checkpoint, ids: Tensor, *, device: str = "cpu", batch: int = 8
) -> float:
    """Of text (sequences, length)."""
    dtype = checkpoint.compute_dtype(device)
    with torch.no_grad():
        stream = LayerwiseModel(checkpoint, ids.split(batch), device, dtype)
        for index in range(len(stream.layers)):
            with stream.filled(index):
                stream.run_all(index)
            stream.step()
        head = "lm_head.weight"
        tied = head in tied_weights(stream.model)
        weight = embedding(checkpoint) if tied else checkpoint.tensor(checkpoint.stored[head])
        weight = weight.to(device, dtype)
        # A sequence at a time: the logits are by far the largest tensor.
        losses = [
            F.cross_entropy(
                F.linear(stream.decoder.norm(hidden[:-1]), weight).float(),
                targets[1:].to(device),
                reduction="sum",
            )
            for hidden, targets in zip(torch.cat(stream.states), ids, strict=True)
        ]
    mean = torch.stack(losses).double().sum() / ids[:, 1:].numel()
    return mean.exp().item()


@dataclass(frozen=True)
class HeldOut:
    """Perplexities on text that nothing else has seen, by the name of each model."""

    perplexities: dict[str, float]
    tokens: int

    def line(self) -> str:
        values = " -> ".join(f"{value:.2f}" for value in self.perplexities.values())
        names = ", ".join(self.perplexities)
        return f"perplexity           {values} ({names}; {self.tokens:,} tokens held out)"

    def fact(self) -> str:
        """The same for a card."""
        values = ", ".join(f"{value:.2f} {name}" for name, value in self.perplexities.items())
        return f"{values}, on {self.tokens:,} tokens held out"


def held_out_sequences(sequences: int) -> int:
    """How many to compute perplexities on, beside so many that are used."""
    return min(16, math.ceil(sequences / 8))


def measure(
    models: Mapping[str, Checkpoint], packed: Path, *, device: str, batch: int = 8
) -> HeldOut:
    """The perplexity of each model on the part of a packed text that is held out."""
    ids = torch.from_numpy(PackedTokens(packed, slice_name="held_out")[:])
    logger.info("computing the perplexity: %s", ", ".join(models))
    values = {n: perplexity(c, ids, device=device, batch=batch) for n, c in models.items()}
    return HeldOut(values, ids.numel())
