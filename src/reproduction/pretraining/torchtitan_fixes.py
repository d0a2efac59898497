"""torchtitan at 0b44d4c, the part of it that flame saves its checkpoints with."""

from __future__ import annotations

import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What the processes agree on after each step: the highest that any of them wants.
GO_ON, SAVE, LEAVE = range(3)


def save_in_time() -> None:
    """Checkpoints are also saved after some time, and when the run is told to stop, by SIGTERM,
    SIGUSR1 or a file, which then ends it.

    torchtitan saves by the number of steps alone. Its settings come from the section `statecut` of
    the job file.
    Upstream: none known. Goes when torchtitan saves on a signal and after some time.
    """
    titan: Any = import_module("torchtitan.components.checkpoint")
    titan.CheckpointManager = saving_in_time(titan.CheckpointManager)


def saving_in_time(manager: Any) -> Any:
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
