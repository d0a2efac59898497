"""OLMo Hybrid, as in transformers."""

from __future__ import annotations

from statecut.models.architectures import base, gated_deltanet
from statecut.models.architectures import linear_attention as hybrid

NORMS = (  # of the layers with a delta rule
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
)


def _with_defaults(config: base.Config) -> base.Config:
    """The widths that transformers takes where a config names none."""
    config = {key: value for key, value in config.items() if value is not None}
    heads = base.need(config, "num_attention_heads")
    key_heads = config.setdefault("linear_num_key_heads", heads)
    config.setdefault("linear_num_value_heads", heads)
    width = config.setdefault(
        "linear_key_head_dim", int(0.75 * base.need(config, "hidden_size") / key_heads)
    )
    config.setdefault("linear_value_head_dim", 2 * width)
    return config


def shape(config: base.Config) -> base.MixerShape:
    # The last of four layers is softmax attention, or of all if there are fewer.
    interval = min(4, base.need(config, "num_hidden_layers"))
    return hybrid.shape({**_with_defaults(config), "full_attention_interval": interval})


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    return hybrid.resized(config | _with_defaults(config), width, value_width)


# transformers' code has 1e-5 for the output norm: the config's rms_norm_eps is of the others.
ARCHITECTURE = base.Architecture(
    "olmo_hybrid",
    rule=gated_deltanet.RULE,
    **{**hybrid.options("olmo_hybrid"), "shape": shape, "resized": resized, "eps_key": None},
    renamed=NORMS,
    joined=hybrid.join_filters,
    repair="transformers saves the filters of this model in thirds, whatever their widths: "
    "`statecut.save(statecut.load(FOLDER), OUT)` writes them right",
    filters=hybrid.KEY_FILTERS,
    value_tensors=(
        *hybrid.VALUE_FILTERS,
        base.ChannelTensor("g_proj.weight", "projection", "value"),
    ),
    norm_eps="o_norm.variance_epsilon",
    convolutions=("conv1d",),
)
