"""How much of its memory a model uses, along one sequence: the file of one analysis."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statecut.files import atomic_write, canonical_json


@dataclass(frozen=True)
class RankAnalysis:
    """What the states of a model are like along one sequence."""

    layers: tuple[int, ...]
    capacity: int  # d = min(d_k, d_v), the rank that a state can have at most
    skip: int
    effective_rank: np.ndarray  # (layers, value heads, T) float32: er(S_t), t = 1 .. T
    heads: tuple[tuple[int, int], ...]  # those with a spectrum: layer, value head
    spectra: np.ndarray  # (len(heads), T - skip, d) float32: singular values, descending
    provenance: dict[str, Any]

    @property
    def utilization(self) -> np.ndarray:
        """u(S_t): (layers, value heads, T)."""
        return self.effective_rank / self.capacity

    def spectrum(self, layer: int, head: int) -> np.ndarray:
        """(T - skip, d): the singular values of one head's states after the skipped tokens."""
        return self.spectra[self.heads.index((layer, head))]

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """One .npz file, the same bytes for the same result."""
        about = dict(vars(self))
        arrays = {name: about.pop(name) for name in ("effective_rank", "spectra")}
        with atomic_write(path, force=force) as aside, open(aside, "wb") as file:
            np.savez(file, about=np.array(canonical_json(about)), **arrays)

    @classmethod
    def load(cls, path: Path | str) -> RankAnalysis:
        with np.load(path, allow_pickle=False) as arrays:
            about = {**arrays} | json.loads(str(arrays["about"]))
        del about["about"]
        about["layers"], about["heads"] = tuple(about["layers"]), tuple(map(tuple, about["heads"]))
        return cls(**about)
