"""What each of flame's processes runs: flame, with our models, our data and our checkpoints.

python -m torch.distributed.run ... -m reproduction.pretraining.flame_entry --job.config_file FILE

The files of flame (e11e7be) and torchtitan (0b44d4c) stay as they are. What is replaced in them
has no upstream issue; it goes when flame takes a data set of token ids and installs, or does not
import, `custom_models`, and when torchtitan saves on a signal and after some time.
"""

from __future__ import annotations

import runpy
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from statecut.data.packing import PackedTokens
from statecut.models.architectures import register

# What the processes agree on after each step: the highest that any of them wants.
GO_ON, SAVE, LEAVE = range(3)


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


def saving_in_time(manager: Any) -> Any:
    """A checkpoint manager that also saves after some time, and when the run is told to stop, by
    SIGTERM, SIGUSR1 or a file, which then ends it. torchtitan's saves by the number of steps alone.
    Its settings come from the section `statecut` of the job file."""

    class SavingInTime(manager):
        def __init__(self, *, job_config: Any, **others: Any) -> None:
            super().__init__(job_config=job_config, **others)
            self.settings = job_config.statecut
            self.saved_at = time.monotonic()
            self.signalled = False
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self.stop)

        def stop(self, *_: Any) -> None:
            self.signalled = True

        def save(self, curr_step: int, force: bool = False) -> None:
            agreed = agree(self.wish())
            super().save(curr_step, force=force or agreed > GO_ON)
            if Path(self._create_checkpoint_id(curr_step)).is_dir():
                self.saved_at = time.monotonic()
            if agreed == LEAVE and not force:
                raise SystemExit(0)

        def wish(self) -> int:
            if self.signalled or Path(self.settings.stop_file).exists():
                return LEAVE
            # One clock is enough.
            late = time.monotonic() - self.saved_at >= self.settings.save_seconds
            return SAVE if late and dist.get_rank() == 0 else GO_ON

    return SavingInTime


def agree(wish: int) -> int:
    """The highest wish of all processes: they must save, and leave, after the same step."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    wishes = torch.tensor(wish, device=device)
    dist.all_reduce(wishes, dist.ReduceOp.MAX)
    return int(wishes)


def main() -> None:
    register()
    if find_spec("custom_models") is None:  # a folder that flame imports and does not install
        sys.modules["custom_models"] = ModuleType("custom_models")
    data: Any = import_module("flame.data")
    data.build_dataset, data.build_dataloader = build_dataset, build_dataloader
    titan: Any = import_module("torchtitan.components.checkpoint")
    titan.CheckpointManager = saving_in_time(titan.CheckpointManager)
    runpy.run_module("flame.train", run_name="__main__")


if __name__ == "__main__":
    main()
