"""Qwen3.5 (and 3.6), dense and with experts, as in transformers: text models, and multimodal ones,
of which the text model is pruned and the rest copied."""

from __future__ import annotations

from dataclasses import replace

from statecut.models.architectures import base, gated_deltanet
from statecut.models.architectures import linear_attention as hybrid


def _config(sizes: base.Config) -> base.Config:
    common = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size",
              "tie_word_embeddings")  # fmt: skip
    shape = gated_deltanet.shape(sizes)
    return {
        **{name: sizes[name] for name in common},
        "linear_num_key_heads": shape.heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.width,
        "linear_value_head_dim": shape.value_width,
        "linear_conv_kernel_dim": sizes["conv_size"],
        "num_attention_heads": sizes["softmax_heads"],
        "num_key_value_heads": sizes["softmax_kv_heads"],
        "head_dim": sizes["softmax_head_dim"],
        "layer_types": hybrid.layer_types(sizes["num_hidden_layers"], sizes["softmax_every"]),
    }


def _mixer_parameters(config: base.Config, shape: base.MixerShape) -> int:
    taps = config["linear_conv_kernel_dim"]
    return gated_deltanet.mixer_parameters({**config, "conv_size": taps, "use_gate": True}, shape)


def _softmax_parameters(config: base.Config) -> int:
    width, heads = config["head_dim"], config["num_attention_heads"]
    # q with a gate, and o; k and v; norms of q and k.
    matrices = 3 * heads + 2 * config["num_key_value_heads"]
    return config["hidden_size"] * width * matrices + 2 * width


Q, K, V = hybrid.queries_keys_values("in_proj_qkv.weight", "projection")

EVERY = "the last of so many layers has softmax attention instead of a delta rule"
SECTION = base.Section(
    "Qwen35Text",
    architecture="qwen3_5_text",
    model_type="qwen3_5_text",
    about="Qwen3.5's dense text model, as in transformers: gated delta rules, and softmax "
    "attention in the last of every few layers.",
    sizes=(
        *gated_deltanet.HEAD_SIZES,
        base.Size("softmax_every", int, EVERY, 4),
        base.Size("softmax_heads", int, "heads of softmax attention"),
        base.Size("softmax_kv_heads", int, "heads of its keys and values"),
        base.Size("softmax_head_dim", int, "width of its heads"),
    ),
    mixer_parameters=_mixer_parameters,
    softmax_parameters=_softmax_parameters,
    config=_config,
)
QWEN3_5_TEXT = base.Architecture(
    "qwen3_5_text",
    rule=gated_deltanet.RULE,
    **hybrid.options("qwen3_5"),
    q_proj=Q,
    k_proj=K,
    filters=hybrid.JOINT[:2],
    v_proj=V,
    value_tensors=(hybrid.JOINT[2], base.ChannelTensor("in_proj_z.weight", "projection", "value")),
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


def multimodal(model_type: str, text: base.Architecture) -> base.Architecture:
    return replace(
        text,
        model_type=model_type,
        text_model="model.language_model.",
        passthrough=("mtp.", "model.visual."),
    )


QWEN3_5 = multimodal("qwen3_5", QWEN3_5_TEXT)
QWEN3_5_MOE = multimodal("qwen3_5_moe", QWEN3_5_MOE_TEXT)
