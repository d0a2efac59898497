"""What a method may look at when it chooses channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keycut.calibration import Activations, Calibration, Rows, Side
from keycut.models.checkpoint import Checkpoint
from keycut.selection.method import Target


@dataclass(frozen=True)
class Evidence:
    """A model, what its calibration measured, and the seed of whatever is drawn.

    `target` says what a method judges by: keys and queries together, or one of them. What is kept
    is always kept of both.
    """

    checkpoint: Checkpoint
    calibration: Calibration | None = None
    target: Target = "kq"
    seed: int = 0

    @property
    def measured(self) -> Calibration:
        """The calibration, for methods that need text."""
        assert self.calibration, "`needs` of the method has no text"
        return self.calibration

    def sum_over_target(self, of: Callable[[Side], Tensor]) -> Tensor:
        return torch.stack([of(side) for side in ("k", "q") if side in self.target]).sum(0)

    def gram(self, side: Side, rows: Rows = "all", activations: Activations = "raw") -> Tensor:
        """K^T K or Q^T Q, (layers, heads, d_k, d_k), float64."""
        return self.measured.gram(side, rows, activations)

    def weight_magnitudes(self, side: Side) -> Tensor:
        """|W| of the query or key projection: (layers, heads, d_k, hidden), float64."""
        kind, shape = self.checkpoint.architecture, self.checkpoint.shape
        tensor = kind.q_proj if side == "q" else kind.k_proj
        today = [kind.name(layer, tensor) for layer in shape.layers]
        names = [self.checkpoint.stored.get(name, name) for name in today]
        found = dict(self.checkpoint.tensors(names))
        layout = torch.from_numpy(tensor.layout(shape))
        return torch.stack([found[n].movedim(tensor.axis, 0)[layout].double().abs() for n in names])
