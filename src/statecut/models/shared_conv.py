"""DeltaNet whose convolution filters are shared: one per head, or one for all channels.

The paper's appendix on convolutions trains such models, for q, k and v alike. Everything else is
flash-linear-attention's DeltaNet. Registered with AutoConfig and AutoModelForCausalLM.
"""

from __future__ import annotations

from typing import Any

import fla.modules.causal_conv1d.ops as conv_ops
import torch
from fla.models.delta_net import DeltaNetConfig, DeltaNetForCausalLM, DeltaNetModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM


class SharedConvDeltaNetConfig(DeltaNetConfig):
    model_type = "delta_net_shared_conv"

    def __init__(self, conv_sharing: str = "head", **kwargs: Any):
        self.conv_sharing = conv_sharing
        super().__init__(**kwargs)


class SharedShortConvolution(nn.Module):
    """`filters` filters for `channels` channels: neighbouring channels have the same one."""

    def __init__(self, channels: int, filters: int, kernel_size: int, std: float):
        super().__init__()
        self.repeats, self.std = channels // filters, std
        self.weight = nn.Parameter(torch.empty(filters, 1, kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As fla starts its own filters; its model classes call this by name."""
        nn.init.normal_(self.weight, mean=0.0, std=self.std)

    def forward(self, x: Tensor, cache: Tensor | None = None, **options: Any) -> Any:
        weight = self.weight[:, 0].repeat_interleave(self.repeats, 0)
        # Looked up at each call: on a CPU another function is there.
        return conv_ops.causal_conv1d(
            x=x, weight=weight, initial_state=cache, activation="silu", backend="triton", **options
        )


def share_filters(model: DeltaNetModel, config: SharedConvDeltaNetConfig) -> None:
    filters = {"head": config.num_heads, "all": 1}[config.conv_sharing]
    for layer in model.layers:
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            channels = getattr(layer.attn, name).hidden_size
            sizes = (channels, filters, config.conv_size, config.initializer_range)
            setattr(layer.attn, name, SharedShortConvolution(*sizes))


class SharedConvDeltaNetModel(DeltaNetModel):
    config_class = SharedConvDeltaNetConfig

    def __init__(self, config: SharedConvDeltaNetConfig):
        super().__init__(config)
        share_filters(self, config)


class SharedConvDeltaNetForCausalLM(DeltaNetForCausalLM):
    config_class = SharedConvDeltaNetConfig

    def __init__(self, config: SharedConvDeltaNetConfig):
        super().__init__(config)
        share_filters(self.model, config)


CONFIG = SharedConvDeltaNetConfig
AutoConfig.register(CONFIG.model_type, CONFIG, exist_ok=True)
AutoModel.register(CONFIG, SharedConvDeltaNetModel, exist_ok=True)
AutoModelForCausalLM.register(CONFIG, SharedConvDeltaNetForCausalLM, exist_ok=True)
