"""Kimi Linear, as in transformers: Kimi Delta Attention, whose config has one width for keys and
values, and multi-head latent attention (MLA) between them. What other hybrids of the two share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statecut.models.architectures import base, kda
from statecut.models.architectures import linear_attention as hybrid

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
SIZES = {  # in published configs below `linear_attn_config`, and what transformers calls them
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def sizes(config: base.Config) -> base.Config:
    """As transformers reads them: published ones come first."""
    text = base.text_config(config)
    flat = {key: text[name] for key, name in SIZES.items() if name in text}
    return {**flat, **(text.get("linear_attn_config") or {})}


def square(config: base.Config, layers: tuple[int, ...]) -> base.MixerShape:
    heads, width = (base.need(sizes(config), key) for key in ("num_heads", "head_dim"))
    return base.MixerShape(layers, heads, width, heads, width)


def shape(config: base.Config) -> base.MixerShape:
    text, kda = base.text_config(config), sizes(config).get("kda_layers")
    if text.get("layer_types") is None:
        numbers = range(base.need(text, "num_hidden_layers"))
        # Published configs count from 1.
        delta = [not i or i % 4 if kda is None else i + 1 in kda for i in numbers]
        text = {**text, "layer_types": ["linear_attention" if rule else "" for rule in delta]}
    return square(config, hybrid.delta_layers(text))


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    """Of keys and values; each place of a config that says the width says the new one."""
    text = base.text_config(config)
    published = text.get("linear_attn_config")
    changes: base.Config = {}
    if published:
        changes["linear_attn_config"] = {**published, "head_dim": width}
    if not published or "linear_head_dim" in text:
        changes["linear_head_dim"] = width
    return base.with_text(config, changes)


def softmax(config: base.Config, shape: base.MixerShape) -> tuple[base.SoftmaxLayers, ...]:
    """MLA keeps one latent vector and one rotated key of a token, whatever its heads."""
    text = base.text_config(config)
    layers = text["num_hidden_layers"] - len(shape.layers)
    latent = base.need(text, "kv_lora_rank") + text.get("qk_rope_head_dim", 0)
    return (base.SoftmaxLayers(layers, 0, 0, beside=latent),) if layers else ()


def taps(config: base.Config) -> int:
    return base.need(sizes(config), "short_conv_kernel_size")


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return hybrid.stack_experts(hybrid.join_filters(tensors))


def forget_gate(*parts: str) -> tuple[tuple[str, str], ...]:
    """Files have its tensors beside those of the mixer."""
    return tuple((rf"\.self_attn\.({part})\b", r".self_attn.forget_gate.\1") for part in parts)


def options(name: str) -> dict[str, Any]:
    """Of an Architecture: what follows from the name of transformers' module."""
    return {
        **hybrid.options(name, RULES),
        "shape": shape,
        "resized": resized,
        "softmax": softmax,
        "taps": taps,
        "options": (),
        "passthrough": (),
        "mixer": "model.layers.{layer}.self_attn.",
        "square": True,
        "joined": joined,
        "norm_eps": "o_norm.variance_epsilon",
        "convolutions": ("conv1d",),
    }


DT_BIAS = base.ChannelTensor("forget_gate.dt_bias", "filter")
F_A, F_B = (f"forget_gate.f_{side}_proj.weight" for side in "ab")
G_A, G_B = (f"g_{side}_proj.weight" for side in "ab")

ARCHITECTURE = base.Architecture(
    "kimi_linear",
    rule=kda.RULE,
    **options("kimi_linear"),
    renamed=(
        *forget_gate("f_a_proj", "f_b_proj", "dt_bias", "A_log"),
        (r"\.block_sparse_moe\.", ".mlp."),
        *((rf"\.experts\.(\d+)\.w{n}\.", rf".experts.\1.{part}_proj.")
          for n, part in ((1, "gate"), (2, "down"), (3, "up"))),
    ),
    filters=(*hybrid.KEY_FILTERS, base.ChannelTensor(F_B, "filter"), DT_BIAS),
    value_tensors=(*hybrid.VALUE_FILTERS, base.ChannelTensor(G_B, "projection", "value")),
    bottlenecks=((F_A, F_B), (G_A, G_B)),
    default_eps=1e-5,
)  # fmt: skip
