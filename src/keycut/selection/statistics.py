"""What a method may look at when it chooses channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keycut.calibration import Activations, Calibration, Rows, Side
from keycut.errors import InputError
from keycut.models.checkpoint import Checkpoint
from keycut.selection.method import Target


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
        """K^T K or Q^T Q: (layers, heads, d_k, d_k), float64."""
        return self.measured.gram(side, rows, activations)

    def saliency(self, side: Side) -> Tensor:
        """sum_i |W_ij dL/dW_ij|: (layers, heads, d_k), float64."""
        return self.measured.tensors[f"saliency.{side}"]

    def fisher(self, side: Side) -> Tensor:
        """Mean over tokens t of (k_tj dL/dk_tj)^2: (layers, heads, d_k), float64."""
        name = f"fisher.{side}"
        if name not in self.measured.tensors:
            raise InputError(
                f"{self.checkpoint.folder}: its calibration was made before Keycut computed "
                f"{name}; calibrate it again"
            )
        return self.measured.tensors[name]

    def weight_magnitudes(self, side: Side) -> Tensor:
        """|W| of the query or key projection: (layers, heads, d_k, hidden), float64."""
        adapter, shape = self.checkpoint.architecture, self.checkpoint.shape
        projection = adapter.q_proj if side == "q" else adapter.k_proj
        layout = torch.from_numpy(projection.layout(shape))
        magnitudes = None
        for index, layer in enumerate(shape.layers):  # one matrix at a time: they may be large
            name = adapter.name(layer, projection)
            weight = self.checkpoint.tensor(self.checkpoint.stored.get(name, name))
            rows = weight.movedim(projection.axis, 0)[layout]
            if magnitudes is None:
                magnitudes = rows.new_empty(len(shape.layers), *rows.shape, dtype=torch.float64)
            magnitudes[index] = rows.abs()
        assert magnitudes is not None, "a model without delta rules has no adapter"
        return magnitudes

    def sum_over(self, target: Target, of: Callable[[Side], Tensor]) -> Tensor:
        """What a method judges by: keys and queries together, or one of them."""
        return torch.stack([of(side) for side in ("k", "q") if side in target]).sum(0)
