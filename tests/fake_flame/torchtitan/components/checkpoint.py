"""torchtitan's checkpoints: saved every so many steps, and when it is forced."""

import re
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class CheckpointManager:
    def __init__(
        self, dataloader, model_parts, optimizers, lr_schedulers, states, job_config, ft_manager
    ):
        assert job_config.checkpoint.enable_checkpoint
        self.folder = Path(job_config.job.dump_folder) / "checkpoint"
        self.interval = job_config.checkpoint.interval
        self.states = {**states, "model": model_parts[0].state_dict(), "dataloader": dataloader}

    def save(self, curr_step, force=False):
        if force or curr_step == 1 or curr_step % self.interval == 0:
            dcp.save(self.states, checkpoint_id=self._create_checkpoint_id(curr_step))
            dist.barrier()

    def load(self, step):
        saved = [int(re.sub(r"\D", "", p.parent.name)) for p in self.folder.glob("*/.metadata")]
        if saved:
            dcp.load(self.states, checkpoint_id=self._create_checkpoint_id(max(saved)))

    def _create_checkpoint_id(self, step):
        return str(self.folder / f"step-{step}")
