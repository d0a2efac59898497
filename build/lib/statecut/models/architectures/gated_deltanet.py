"""Gated DeltaNet, as in flash-linear-attention."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from reproduction.config.models import ModelBase
from reproduction.config.section import WHICH
from statecut.errors import InputError
from statecut.models.architectures import base

CALL = base.Call(
    "fla.layers.gated_deltanet",
    ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    options={"state_v_first": True},
)


def shape(config: base.Config) -> base.MixerShape:
    heads, width = base.need(config, "num_heads"), base.need(config, "head_dim")
    value_heads = config.get("num_v_heads") or heads
    if value_heads % heads:
        raise InputError(f"num_v_heads {value_heads} must be a multiple of num_heads {heads}")
    expand_v = config.get("expand_v", 2.0)
    return base.MixerShape(
        layers=base.mixer_layers(config),
        heads=heads,
        width=base.whole(width, "head_dim"),
        value_heads=value_heads,
        value_width=base.whole(width * expand_v, f"head_dim {width} x expand_v {expand_v}"),
    )


def resized(config: base.Config, width: int, value_width: int | None = None) -> base.Config:
    # fla takes int(head_dim * expand_v).
    expand_v = base.factor(value_width or shape(config).value_width, width)
    return {**config, "head_dim": width, "expand_v": expand_v}


def stand_ins() -> list[base.StandIn]:
    from statecut.models import plain_kernels

    return [
        *((CALL.module, name, plain_kernels.delta_rule) for name in CALL.functions),
        (CALL.module, "causal_conv1d", plain_kernels.causal_conv1d),
    ]


def _layer(*, width: int, head_v_dim: int, **sizes: Any) -> Any:
    from fla import layers

    return layers.GatedDeltaNet(
        **sizes, head_dim=width, expand_v=base.factor(head_v_dim, width), layer_idx=0
    )


class GatedDeltaNet(ModelBase):
    """Gated DeltaNet, as in flash-linear-attention: head widths are free."""

    architecture: Literal["gated_deltanet"] = WHICH
    model_type: ClassVar[str] = "gated_deltanet"
    head_dim: PositiveInt = Field(description="width of a head's keys and queries")
    expand_v: PositiveFloat = Field(description="width of a head's values, as a multiple of that")
    num_v_heads: PositiveInt | None = Field(
        None, description="heads of values, a multiple of num_heads; as many if absent"
    )
    use_gate: bool = Field(True, description="whether the output is gated")

    @property
    def parameters(self) -> int:
        keys, values = self.num_heads * self.head_k_dim, self.value_heads * self.head_v_dim
        gate = self.hidden_size * values if self.use_gate else 0
        # a and beta from the input; A_log and dt_bias of their own.
        decay = (2 * self.hidden_size + 2) * self.value_heads
        rest = gate + decay + self.head_v_dim
        return self._parameters(keys, values, 2 * keys + values, rest)


SECTION = GatedDeltaNet
ARCHITECTURE = base.Architecture(
    "gated_deltanet",
    rule=base.DeltaRule(
        "gated_deltanet",
        chunked="chunk_gated_delta_rule",
        layer=_layer,
        heads=4,
        value_width=256,
        gated=True,
        grouped=True,
    ),
    call=CALL,
    shape=shape,
    resized=resized,
    stand_ins=stand_ins,
)
