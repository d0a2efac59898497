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
from statecut.pruning.calibration import Activations, Calibration, Rows, Side
from statecut.pruning.slicing import fold


@dataclass(frozen=True)
class ModelStatistics:
    """A model's weights, and what its calibration measured, if there is one."""

    checkpoint: Checkpoint
    calibration: Calibration | None = None

    @property
    def measured(self) -> Calibration:
        if self.calibration is None:
            raise InputError(f"{self.checkpoint.folder}: no calibration of it was given")
        return self.calibration

    @property
    def tokens(self) -> int:
        """Of the calibration text."""
        return int(self.measured.manifest["tokens"])

    @property
    def input_norms(self) -> Tensor:
        """||X_:i||_2 of each input feature of the projections: (layers, hidden), float64."""
        return self.measured.tensors["input_norm"]

    def gram(self, side: Side, rows: Rows = "all", activations: Activations = "raw") -> Tensor:
        """K^T K or Q^T Q: (layers, heads, d_k, d_k), float64. Of values X^T X, X what enters the
        output projection: (layers, value heads, d_v, d_v)."""
        return self.measured.gram(side, rows, activations)

    def saliency(self, side: Side) -> Tensor:
        """sum_i |W_ij dL/dW_ij|: (layers, heads, d_k), float64."""
        return self.measured.tensors[f"saliency.{side}"]

    def fisher(self, side: Side) -> Tensor:
        """Mean over tokens t of (k_tj dL/dk_tj)^2: (layers, heads, d_k), float64. Of values the
        same of what enters the output projection: (layers, value heads, d_v)."""
        name = f"fisher.{side}"
        if name not in self.measured.tensors:
            raise InputError(
                f"{self.checkpoint.folder}: its calibration was made before Statecut computed "
                f"{name}; calibrate it again"
            )
        return self.measured.tensors[name]

    def weight_magnitudes(self, side: Side) -> Tensor:
        """|W| of the query or key projection: (layers, heads, d_k, hidden), float64. Of the value
        projection times the sum of what reads the channel, the magnitudes of its column of the
        output projection with the norm's weight: (layers, value heads, d_v, hidden)."""
        adapter, shape = self.checkpoint.architecture, self.checkpoint.shape
        projection = {"q": adapter.q_proj, "k": adapter.k_proj, "v": adapter.v_proj}[side]
        (layout,) = torch.from_numpy(projection.places(shape))
        magnitudes = None
        for index, layer in enumerate(shape.layers):  # one matrix at a time: they may be large
            weight = self._tensor(layer, projection)
            rows = weight.movedim(projection.axis, 0)[layout]
            if magnitudes is None:
                magnitudes = rows.new_empty(len(shape.layers), *rows.shape, dtype=torch.float64)
            magnitudes[index] = rows.abs()
            if side == "v":
                norm = self._tensor(layer, adapter.norm)
                readers = fold(self._tensor(layer, adapter.o_proj), norm).abs().sum(0)
                magnitudes[index] *= readers.view(*shape.size("value"), 1)
        assert magnitudes is not None, "a model without delta rules has no adapter"
        return magnitudes

    def _tensor(self, layer: int, tensor: ChannelTensor | str) -> Tensor:
        name = self.checkpoint.architecture.name(layer, tensor)
        return self.checkpoint.tensor(self.checkpoint.stored.get(name, name))

    def sum_over(self, target: Target | Literal["v"], of: Callable[[Side], Tensor]) -> Tensor:
        """What a method judges by: keys and queries together, or one of them, or values."""
        return torch.stack([of(side) for side in ("k", "q", "v") if side in target]).sum(0)
