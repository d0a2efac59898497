"""Ling 3, as in transformers: Kimi Delta Attention with gates of full rank, between them MLA."""

from __future__ import annotations

from statecut.models.architectures import base, kda, kimi_linear
from statecut.models.architectures import linear_attention as hybrid


def sizes(config: base.Config) -> base.Config:
    """transformers takes `head_dim` for the delta rule's, and then writes another's there."""
    width = config.get("linear_head_dim") or base.need(config, "head_dim")
    heads = config.get("linear_num_heads") or base.need(config, "num_attention_heads")
    return {"linear_head_dim": width, "linear_num_heads": heads}


def shape(config: base.Config) -> base.MixerShape:
    taps(config)  # Ling 2.x is another architecture of this model_type, without filters
    groups = {**config, "full_attention_interval": config.get("layer_group_size", 6)}
    return kimi_linear.square(sizes(config), hybrid.delta_layers(groups))


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    flat = {"linear_head_dim": width} if "linear_head_dim" in config else {}
    return {**config, "head_dim": width, **flat}


def taps(config: base.Config) -> int:
    return base.need(config, "short_conv_kernel_size")


ARCHITECTURE = base.Architecture(
    "bailing_hybrid",
    rule=kda.RULE,
    **{
        **kimi_linear.options("bailing_hybrid"),
        "shape": shape,
        "resized": resized,
        "taps": taps,
    },
    since="5.23",
    renamed=(
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
        *kimi_linear.forget_gate("f_proj", "dt_bias", "A_log"),
    ),
    filters=(
        *hybrid.KEY_FILTERS,
        base.ChannelTensor("forget_gate.f_proj.weight", "filter"),
        kimi_linear.DT_BIAS,
    ),
    value_tensors=(
        *hybrid.VALUE_FILTERS,
        base.ChannelTensor("g_proj.weight", "projection", "value"),
    ),
)
