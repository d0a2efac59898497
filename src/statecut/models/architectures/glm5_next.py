"""GLM-5.3-Flash, as in transformers: Kimi Delta Attention, MLA that chooses tokens by an indexer,
and several residual streams. The text model, and the multimodal one, whose rest is copied."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module

from statecut.models.architectures import base, kimi_linear
from statecut.models.architectures import linear_attention as hybrid


def shape(config: base.Config) -> base.MixerShape:
    return kimi_linear.square(config, hybrid.delta_layers(base.text_config(config)))


def softmax(config: base.Config, shape: base.MixerShape) -> tuple[base.SoftmaxLayers, ...]:
    """With the keys of their indexers, several tokens' in one, as engines keep them."""
    text = base.text_config(config)
    indexer = text.get("index_head_dim", 0) // text.get("index_kpool", 1)
    kinds = kimi_linear.softmax(config, shape)
    return tuple(replace(kind, beside=kind.beside + indexer) for kind in kinds)


GLM5_NEXT_TEXT = replace(
    kimi_linear.ARCHITECTURE,
    model_type="glm5_next_text",
    **{
        **kimi_linear.options("glm5_next"),
        "shape": shape,
        "softmax": softmax,
        "layer_output": lambda hidden: (hidden, None),
    },
    register=partial(import_module, "statecut.models.glm5_next_text"),
    since="5.23",  # 5.17 has it, and registers no class of others for a config of its own
    streams=("attn_hc", "ffn_hc"),
    renamed=(
        *kimi_linear.forget_gate("f_a_proj", "f_b_proj", "dt_bias", "A_log"),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    ),
)
GLM5_NEXT = replace(
    GLM5_NEXT_TEXT,
    model_type="glm5_next",
    text_model="model.language_model.",
    passthrough=("model.visual.",),
)
