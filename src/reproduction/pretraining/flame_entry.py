"""What each of flame's processes runs: flame, with our models, our data and our checkpoints.

python -m torch.distributed.run ... -m reproduction.pretraining.flame_entry --job.config_file FILE
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from reproduction.pretraining import flame_fixes as flame
from reproduction.pretraining import torchtitan_fixes as torchtitan
from statecut.data.packing import PackedTokens
from statecut.models.architectures import register


class PackedBatches(Stateful):
    """The share of one process in the batches of packed tokens, from where training stands.

    Batch n is the one that the built-in trainer takes, on any number of GPUs, and the place in the
    data is a number.
    """

    def __init__(
        self, data: PackedTokens, seed: int, batch: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.data, self.seed, self.batch = data, seed, batch
        self.rank, self.world_size = rank, world_size
        self.sequences = 0  # taken by all processes together

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        together = self.batch * self.world_size
        mine = slice(self.rank * self.batch, (self.rank + 1) * self.batch)
        start = self.sequences // together
        for ids in self.data.batches(together, seed=self.seed, start=start):
            self.sequences += together
            input_ids = torch.from_numpy(ids[mine])
            # The model itself shifts them: a token's label is the one after it.
            yield {"input_ids": input_ids, "labels": input_ids.clone()}

    def state_dict(self) -> dict[str, Tensor]:
        return {"sequences": torch.tensor(self.sequences)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sequences = int(state_dict["sequences"])


def build_dataset(dataset: str, dataset_split: str, seed: int, **_: Any) -> tuple[Any, ...]:
    """A packed folder, one of its slices, and the seed of its order."""
    return PackedTokens(dataset, slice_name=dataset_split), seed


def build_dataloader(
    dataset: tuple[PackedTokens, int], rank: int, world_size: int, batch_size: int, **_: Any
) -> PackedBatches:
    return PackedBatches(*dataset, batch_size, rank, world_size)


def main() -> None:
    register()
    flame.provide_custom_models()
    flame.replace_data(build_dataset, build_dataloader)
    torchtitan.save_in_time()
    runpy.run_module("flame.train", run_name="__main__")


if __name__ == "__main__":
    main()
