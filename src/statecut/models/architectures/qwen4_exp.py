"""Qwen4-Exp (Qwen3.8-Flash-Next), as in transformers: Qwen3.5's delta rules, experts and multimodal
wrapper, between several residual streams; its softmax layers choose tokens by an indexer, and some
layers add embeddings of n-grams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from statecut.models.architectures import base, qwen3_5
from statecut.models.architectures import linear_attention as hybrid

if TYPE_CHECKING:
    from torch import Tensor


def softmax(config: base.Config, shape: base.MixerShape) -> tuple[base.SoftmaxLayers, ...]:
    """With the keys of their indexers."""
    indexer = base.text_config(config).get("indexer_head_dim") or 0
    return tuple(replace(kind, beside=indexer) for kind in hybrid.softmax(config, shape))


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts, and the rows of an embedding of n-grams, which files have in shards."""
    import torch

    result: dict[str, Tensor] = {}
    shards: dict[str, dict[int, Tensor]] = {}
    for name, tensor in hybrid.stack_experts(tensors).items():
        table, shard, number = name.removesuffix(".weight").partition(".ngram_embedding.shard_")
        if shard:
            shards.setdefault(f"{table}.ngram_embedding.weight", {})[int(number)] = tensor
        else:
            result[name] = tensor
    for name, parts in shards.items():
        result[name] = torch.cat([parts[number] for number in sorted(parts)])
    return result


QWEN4_EXP_TEXT = replace(
    qwen3_5.QWEN3_5_MOE_TEXT,
    model_type="qwen4_exp_text",
    **{**hybrid.options("qwen4_exp"), "softmax": softmax},
    joined=joined,
    streams=("attn_hyper_connection", "mlp_hyper_connection"),
    shares=2,
    convolutions=("linear_attn.conv1d",),  # the embeddings of n-grams have one, too
)
QWEN4_EXP = qwen3_5.multimodal("qwen4_exp", QWEN4_EXP_TEXT)
