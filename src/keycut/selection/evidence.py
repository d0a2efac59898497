"""What a method may look at when it chooses channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from keycut.calibration import Activations, Calibration, Rows, Side
from keycut.errors import InputError
from keycut.models.checkpoint import Checkpoint

Target = Literal["kq", "k", "q"]


@dataclass(frozen=True)
class Evidence:
    """A model, what its calibration found, and how a method is to use it.

    `target` says whose scores or activations count: keys and queries together, or one of them.
    What is kept is always kept of both. `f`, `rows` and `activations` are for drrqr and qrcp;
    `seed` is for rand.
    """

    checkpoint: Checkpoint
    calibration: Calibration | None = None
    target: Target = "kq"
    seed: int = 0
    f: float = 1.5
    rows: Rows = "sample"
    activations: Activations = "raw"

    def sides(self) -> tuple[Side, ...]:
        return {"kq": ("k", "q"), "k": ("k",), "q": ("q",)}[self.target]  # type: ignore[return-value]

    def calibrated(self, method: str) -> Calibration:
        if self.calibration is None:
            raise InputError(f"method {method} needs a calibration, and none was given")
        return self.calibration

    def weights(self, side: Side) -> Tensor:
        """|W| of the query or key projection: (layers, heads, d_k, hidden), float64."""
        kind, shape = self.checkpoint.architecture, self.checkpoint.shape
        tensor = kind.q_proj if side == "q" else kind.k_proj
        today = [kind.name(layer, tensor) for layer in shape.layers]
        names = [self.checkpoint.stored.get(name, name) for name in today]
        found = dict(self.checkpoint.tensors(names))
        layout = torch.from_numpy(tensor.layout(shape))
        return torch.stack([found[n].movedim(tensor.axis, 0)[layout].double().abs() for n in names])

    def gram(self, method: str, rows: Rows, activations: Activations) -> Tensor:
        """M^T M of the target's rows, (layers, heads, d_k, d_k): M = [K; Q] is the sum of two."""
        found = self.calibrated(method)
        return torch.stack([found.gram(s, rows, activations) for s in self.sides()]).sum(0)
