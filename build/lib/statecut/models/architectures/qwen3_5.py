"""Qwen3.5 (and 3.6), dense and with experts, as in transformers: text models, and multimodal ones,
of which the text model is pruned and the rest copied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from reproduction.config.models import ModelBase
from reproduction.config.section import WHICH
from statecut.models.architectures import base, gated_deltanet
from statecut.models.architectures import linear_attention as hybrid


class Qwen35Text(ModelBase):
    """Qwen3.5's dense text model, as in transformers: gated delta rules, and softmax attention in
    the last of every few layers."""

    architecture: Literal["qwen3_5_text"] = WHICH
    model_type: ClassVar[str] = "qwen3_5_text"
    head_dim: PositiveInt = Field(description="width of a head's keys and queries")
    expand_v: PositiveFloat = Field(description="width of a head's values, as a multiple of that")
    num_v_heads: PositiveInt | None = Field(
        None, description="heads of values, a multiple of num_heads; as many if absent"
    )
    softmax_every: PositiveInt = Field(
        4, description="the last of so many layers has softmax attention instead of a delta rule"
    )
    softmax_heads: PositiveInt = Field(description="heads of softmax attention")
    softmax_kv_heads: PositiveInt = Field(description="heads of its keys and values")
    softmax_head_dim: PositiveInt = Field(description="width of its heads")

    def fla_config(self) -> dict[str, Any]:
        value_width = self.head_dim * self.expand_v
        layers = range(1, self.num_hidden_layers + 1)
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "intermediate_size": self.mlp_width,
            "tie_word_embeddings": self.tie_word_embeddings,
            "linear_num_key_heads": self.num_heads,
            "linear_num_value_heads": self.num_v_heads or self.num_heads,
            "linear_key_head_dim": self.head_dim,
            "linear_value_head_dim": base.whole(
                value_width, f"head_dim {self.head_dim} x expand_v {self.expand_v}"
            ),
            "linear_conv_kernel_dim": self.conv_size,
            "num_attention_heads": self.softmax_heads,
            "num_key_value_heads": self.softmax_kv_heads,
            "head_dim": self.softmax_head_dim,
            "layer_types": [
                "linear_attention" if layer % self.softmax_every else "full_attention"
                for layer in layers
            ],
        }

    @property
    def parameters(self) -> int:
        hidden = self.hidden_size
        keys, values = self.num_heads * self.head_k_dim, self.value_heads * self.head_v_dim
        # A gate; a and beta from the input; A_log and dt_bias of their own.
        rest = hidden * values + (2 * hidden + 2) * self.value_heads + self.head_v_dim
        width = self.softmax_head_dim
        # q with a gate, and o; k and v; norms of q and k.
        softmax = hidden * width * (3 * self.softmax_heads + 2 * self.softmax_kv_heads) + 2 * width
        return self._parameters(keys, values, 2 * keys + values, rest, softmax=softmax)


Q, K, V = hybrid.queries_keys_values("in_proj_qkv.weight", "projection")
FILTERS = hybrid.queries_keys_values("conv1d.weight", "filter")

SECTION = Qwen35Text
QWEN3_5_TEXT = base.Architecture(
    "qwen3_5_text",
    rule=gated_deltanet.ARCHITECTURE.rule,
    **hybrid.options("qwen3_5"),
    q_proj=Q,
    k_proj=K,
    filters=FILTERS[:2],
    v_proj=V,
    value_tensors=(FILTERS[2], base.ChannelTensor("in_proj_z.weight", "projection", "value")),
    o_proj="out_proj.weight",
    norm_eps="norm.variance_epsilon",
    projections=("in_proj_qkv",),
    convolutions=("conv1d",),
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    **hybrid.options("qwen3_5_moe"),
    joined=hybrid.stack_experts,
)


def _multimodal(model_type: str, text: base.Architecture) -> base.Architecture:
    return replace(
        text,
        model_type=model_type,
        text_model="model.language_model.",
        beyond=("mtp.", "model.visual."),
    )


QWEN3_5 = _multimodal("qwen3_5", QWEN3_5_TEXT)
QWEN3_5_MOE = _multimodal("qwen3_5_moe", QWEN3_5_MOE_TEXT)
