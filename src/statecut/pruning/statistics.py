"""What a method may look at when it chooses channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from statecut.arguments import Target
from statecut.errors import InputError
from statecut.models.architectures.base import ChannelTensor
from statecut.models.checkpoint import Checkpoint
from statecut.models.loaded import Loaded
from statecut.pruning.activations import Activations, Rows, Side
from statecut.pruning.calibration import Calibration
from statecut.pruning.slicing import fold


@dataclass(frozen=True)
class ModelStatistics:
    """A model's weights, and what its calibration measured, if there is one."""

    checkpoint: Checkpoint | Loaded
    calibration: Calibration | None = None

    def measured(self, name: str) -> Tensor:
        """A tensor of the calibration."""
        if self.calibration is None:
            raise InputError(
                f"{self.checkpoint.place}: this method needs a calibration; l1 does not"
            )
        if name not in self.calibration.tensors:
            needed = "values=True" if ".v" in name else "gradients=True"
            raise InputError(
                f"{self.checkpoint.place}: {name} was not measured: calibrate with {needed} (a "
                "method names in its `needs` what it uses)"
            )
        return self.calibration.tensors[name]

    @property
    def tokens(self) -> int:
        """Of the calibration text."""
        assert self.calibration
        return int(self.calibration.manifest["tokens"])

    @property
    def input_norms(self) -> Tensor:
        """||X_:i||_2 of each input feature of the projections: (layers, hidden), float64."""
        return self.measured("input_norm")

    def gram(self, side: Side, rows: Rows = "all", activations: Activations = "raw") -> Tensor:
        """K^T K or Q^T Q: (layers, heads, d_k, d_k), float64. Of values X^T X, X what enters the
        output projection: (layers, value heads, d_v, d_v)."""
        return self.measured(f"{'gram' if rows == 'all' else 'sample'}.{side}.{activations}")

    def saliency(self, side: Side) -> Tensor:
        """sum_i |W_ij dL/dW_ij|: (layers, heads, d_k), float64."""
        return self.measured(f"saliency.{side}")

    def fisher(self, side: Side) -> Tensor:
        """Mean over tokens t of (k_tj dL/dk_tj)^2: (layers, heads, d_k), float64. Of values the
        same of what enters the output projection: (layers, value heads, d_v)."""
        return self.measured(f"fisher.{side}")

    def weight_magnitudes(self, side: Side) -> Tensor:
        """|W| of the query or key projection: (layers, heads, d_k, hidden), float64. Of the value
        projection times the sum of what reads the channel, the magnitudes of its column of the
        output projection with the norm's weight: (layers, value heads, d_v, hidden)."""
        kind, shape = self.checkpoint.architecture, self.checkpoint.shape
        projection = {"q": kind.q_proj, "k": kind.k_proj, "v": kind.v_proj}[side]
        (layout,) = torch.from_numpy(projection.places(shape))
        size = (len(shape.layers), *layout.shape, self.checkpoint.text_config["hidden_size"])
        magnitudes = torch.empty(size, dtype=torch.float64)
        for index, layer in enumerate(shape.layers):  # one matrix at a time: they may be large
            weight = self._tensor(layer, projection)
            magnitudes[index] = weight.movedim(projection.axis, 0)[layout].abs()
            if side == "v":
                norm = self._tensor(layer, kind.norm)
                readers = fold(self._tensor(layer, kind.o_proj), norm).abs().sum(0)
                magnitudes[index] *= readers.view(*shape.size("value"), 1)
        return magnitudes

    def _tensor(self, layer: int, tensor: ChannelTensor | str) -> Tensor:
        name = self.checkpoint.architecture.name(layer, tensor)
        return self.checkpoint.tensor(self.checkpoint.stored.get(name, name))

    def sum_over(self, target: Target | Literal["v"], of: Callable[[Side], Tensor]) -> Tensor:
        """What a method judges by: keys and queries together, or one of them, or values."""
        return torch.stack([of(side) for side in ("k", "q", "v") if side in target]).sum(0)
