"""The perplexity of text, with one layer of the model in memory at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from statecut.data.packing import PackedTokens, pack
from statecut.data.sources import describe, read
from statecut.data.tokenizer import check_vocabulary, load_tokenizer
from statecut.models.checkpoint import Checkpoint, tied_weights
from statecut.models.layerwise import LayerwiseModel
from statecut.models.loaded import Loaded

logger = logging.getLogger(__name__)

EMBEDDINGS = ("model.embeddings.weight", "model.embed_tokens.weight")


def embedding(checkpoint: Checkpoint | Loaded) -> Tensor:
    """As it is stored."""
    (name,) = (stored for current, stored in checkpoint.stored.items() if current in EMBEDDINGS)
    return checkpoint.tensor(name)


def perplexity(
    checkpoint: Checkpoint | Loaded, ids: Tensor, *, device: str = "cpu", batch: int = 8
) -> float:
    """Of text (sequences, length)."""
    dtype = checkpoint.compute_dtype(device)
    with torch.no_grad():
        batches = ids.split(batch)
        stream = LayerwiseModel(checkpoint, batches, device, dtype)
        last = len(stream.layers) - 1
        for index in range(last):
            with stream.filled(index):
                stream.run_all(index)
            stream.step()
        head = "lm_head.weight"
        tied = head in tied_weights(stream.model)
        weight = embedding(checkpoint) if tied else checkpoint.tensor(checkpoint.stored[head])
        weight = weight.to(device, dtype)
        with stream.filled(last):
            # A sequence at a time: the logits are by far the largest tensor.
            losses = [
                F.cross_entropy(
                    F.linear(hidden[:-1], weight).float(), targets[1:].to(device), reduction="sum"
                )
                for number, sequences in enumerate(batches)
                for hidden, targets in zip(stream.run(last, number), sequences, strict=True)
            ]
    mean = torch.stack(losses).double().sum() / ids[:, 1:].numel()
    return mean.exp().item()


def read_tokens(
    text: Path | str, model: Checkpoint, *, sequences: int, length: int, seed: int
) -> Tensor:
    """Token ids (sequences, length) of a text, by a model's own tokenizer."""
    with TemporaryDirectory() as folder:
        packed, slices = Path(folder) / "text", {"evaluation": sequences}
        pack_text(Path(text), model, packed, slices=slices, length=length, seed=seed)
        return torch.from_numpy(PackedTokens(packed)[:])


def held_out_sequences(sequences: int) -> int:
    """How many to compute perplexities on, beside so many that are used."""
    return min(16, math.ceil(sequences / 8))


def measure(model: Checkpoint, packed: Path, device: str, batch: int = 8) -> float:
    """The perplexity of the part of a packed text that is held out."""
    ids = torch.from_numpy(PackedTokens(packed, slice_name="held_out")[:])
    return perplexity(model, ids, device=device, batch=batch)


def pack_text(
    text: Path, model: Checkpoint, out: Path, *, slices: Mapping[str, int], length: int, seed: int
) -> None:
    """Pack a text with a model's own tokenizer."""
    tokenizer = load_tokenizer(model.folder)
    check_vocabulary(tokenizer, model.text_config["vocab_size"])
    parts = ", ".join(f"{n} for {name.replace('_', ' ')}" for name, n in slices.items())
    logger.info("text: sequences of %d tokens, %s", length, parts)
    pack(
        read(text, seed=seed),
        tokenizer,
        out,
        sequence_length=length,
        sequences=slices,
        source=describe(text),
        seed=seed,
        share_documents=True,  # a text file without blank lines is one document
    )
