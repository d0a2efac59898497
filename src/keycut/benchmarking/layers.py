"""One mixer layer of flash-linear-attention, by its widths."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from keycut.config import Kernel
from keycut.models.architectures import ARCHITECTURES

SEED = 0


def fla_layers() -> Any:
    """`fla.layers`, runnable also where there is no GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        import fla.layers
    from keycut.models import kernels

    kernels.prepare()
    return fla.layers


def mixer(
    kernel: Kernel,
    *,
    hidden_size: int,
    num_heads: int,
    width: int,
    head_v_dim: int,
    num_v_heads: int | None = None,
    use_gate: bool,
    device: str,
    dtype: torch.dtype,
) -> Any:
    """A layer with random weights, the same for the same seed and device."""
    given: dict[str, Any] = {
        "model_type": kernel,
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
    }
    if kernel == "delta_net":
        given["expand_v"] = num_heads * head_v_dim / hidden_size
    else:
        given |= {"head_dim": head_v_dim, "expand_v": 1.0, "num_v_heads": num_v_heads}
    given = ARCHITECTURES[kernel].resized(given, width)
    layers = fla_layers()
    kind = layers.DeltaNet if kernel == "delta_net" else layers.GatedDeltaNet
    torch.manual_seed(SEED)
    with torch.device(device):
        return kind(**given, use_gate=use_gate, layer_idx=0).to(dtype)
