"""How much of its memory a model uses: the states S_t of every head along one sequence.

The recurrence is that of `statecut.models.delta_rule`, in float32, over what the layers really hand
to their delta rules, the gate of Gated DeltaNet included. S_t is the state after token t has been
written, so S_1 has rank one.

All heads of all layers go through the sequence together, a block of tokens at a time. Of the
states only one block is ever held; keys and values are held for the whole sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reproduction.analysis.rank import RankAnalysis
from reproduction.analysis.spectra import effective_ranks
from statecut.data.progress import Progress
from statecut.models.capture import capture_rule_inputs, mixers
from statecut.models.delta_rule import l2_normalised, log_decay, no_tf32
from statecut.pruning.calibration import check_finite
from statecut.version import __version__

BLOCK_BYTES = 2**28  # of states; what is computed from them takes about three times as much


class Writes(NamedTuple):
    """What a sequence of T tokens writes into H states; heads of all layers, one after the other.

    In float32: k (T, H, d_k) as the rule uses it, v (T, H, d_v), beta and the log decay g (T, H).
    """

    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor


def analyse_rank(
    model: Any,
    ids: Tensor,
    *,
    model_digest: str,
    heads: Sequence[tuple[int, int]] = (),
    skip: int = 128,
    block_bytes: int = BLOCK_BYTES,
) -> RankAnalysis:
    """The effective rank of every state of `model` along the tokens `ids` (T).

    `heads` (layer, value head) are those whose singular values are kept, the first `skip` tokens
    left out. Works on the model's device.
    """
    _, shape, _ = mixers(model)
    place = {layer: i for i, layer in enumerate(shape.layers)}
    rows = [place[layer] * shape.value_heads + head for layer, head in heads]
    ranks, spectra = [], []
    first, progress = 0, Progress("analysing states", tokens=len(ids))
    with no_tf32():
        for states in states_in_blocks(writes(model, ids), block_bytes):
            block = effective_ranks(states.flatten(0, 1)).view(len(states), -1)
            block = block.T.reshape(len(shape.layers), shape.value_heads, -1)
            check_finite({"the effective rank of its states": block}, shape)
            ranks.append(block.cpu())
            # On the CPU, so that a spectrum is not the work of one library here and another there.
            chosen = states[max(0, skip - first) :, rows].cpu()
            spectra.append(torch.linalg.svdvals(chosen).transpose(0, 1))
            first += len(states)
            progress.add(tokens=len(states))
    device = next(model.parameters()).device
    return RankAnalysis(
        layers=shape.layers,
        capacity=min(shape.width, shape.value_width),
        skip=skip,
        effective_rank=torch.cat(ranks, -1).numpy(),
        heads=tuple(heads),
        spectra=torch.cat(spectra, 1).numpy(),
        provenance={
            "model_digest": model_digest,
            "tokens": len(ids),
            "tokens_sha256": hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "statecut": __version__,
            "torch": torch.__version__,
            "flash-linear-attention": version("flash-linear-attention"),
        },
    )


@torch.no_grad()
def writes(model: Any, ids: Tensor) -> Writes:
    """What the tokens `ids` (T) write into the states of `model`, from one forward pass."""
    parts: list[Writes] = []
    model.eval()
    with capture_rule_inputs(model, lambda _, arguments: parts.append(layer_writes(arguments))):
        model.base_model(ids[None].to(next(model.parameters()).device), use_cache=False)
    return Writes(*(torch.cat(layers, 1) for layers in zip(*parts, strict=True)))


def layer_writes(rule: dict[str, Any]) -> Writes:
    """Those of one layer, from the arguments of its rule.

    What the kernels would do first is done here: normalise keys, repeat them for several value
    heads, and for Gated DeltaNet the sigmoid of beta and the gate.
    """
    k, v, beta = (rule[name][0].float() for name in ("k", "v", "beta"))
    if rule["use_qk_l2norm_in_kernel"]:
        k = l2_normalised(k)
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    if rule.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if rule["allow_neg_eigval"] else 1)
    g = rule["g"][0].float() if "g" in rule else torch.zeros_like(beta)
    if rule.get("A_log") is not None:  # transformers' models compute the gate before their rule
        g = log_decay(rule["g"][0], rule["A_log"], rule["dt_bias"])
    return Writes(k, v, beta, g)


def states_in_blocks(w: Writes, block_bytes: int = BLOCK_BYTES) -> Iterator[Tensor]:
    """S_1, S_2, ... as blocks (tokens, H, d_k, d_v) of `block_bytes` at most, or of one token.

    A block is written over by the next one, which goes on from its last state: read it only.
    """
    T, H, d_k = w.k.shape
    d_v = w.v.shape[-1]
    state = w.k.new_zeros(H, d_k, d_v)
    size = min(T, max(1, block_bytes // (state.numel() * state.element_size())))
    block = w.k.new_empty(size, H, d_k, d_v)
    decay = w.g.exp()[..., None, None]
    for first in range(0, T, size):
        last = min(first + size, T)
        for t in range(first, last):
            faded = decay[t] * state
            recalled = w.k[t, :, None] @ faded  # (H, 1, d_v)
            u = w.beta[t, :, None, None] * (w.v[t, :, None] - recalled)
            state = torch.baddbmm(faded, w.k[t, :, :, None], u, out=block[t - first])
        yield block[: last - first]
