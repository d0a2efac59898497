"""A model in memory, with what functions need of one on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from statecut.files import digest
from statecut.models.checkpoint import Tensors
from statecut.models.description import Description


class Loaded(Description):
    """Its tensors have the names of its parameters."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.config.to_dict(), model.name_or_path or type(model).__name__)
        self.model = model

    @cached_property
    def stored(self) -> dict[str, str]:
        return {name: name for name in self.model.state_dict()}

    def tensors(self, names: Iterable[str] | None = None) -> Tensors:
        state = self.model.state_dict()
        return ((name, state[name]) for name in (state if names is None else names))

    def tensor(self, name: str) -> torch.Tensor:
        return self.model.state_dict()[name]

    def headers(self) -> Tensors:
        return ((name, tensor.to("meta")) for name, tensor in self.tensors())

    def compute_dtype(self, device: torch.device | str) -> torch.dtype:
        return self.model.dtype

    def digest(self) -> str:
        """Of its config and its weights as they are now."""
        weights = {}
        for name, tensor in self.tensors():
            numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            weights[name] = hashlib.sha256(numbers.data).hexdigest()
        return digest({"config": str(self.model.config), "weights": weights})
