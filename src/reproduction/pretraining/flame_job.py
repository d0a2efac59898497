"""What flame is told: its command, its job file and the model's config, in a run's folder."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.config.training import Recipe
from reproduction.pretraining import flame_entry
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.files import atomic_write, write_json
from statecut.recovery.checkpoints import KEPT
from statecut.recovery.loop import Saving

# A process may tune kernels for minutes, or hash a checkpoint, while the others wait for it.
PATIENT_SECONDS = 3600


@dataclass(frozen=True)
class Share:
    """How a step's sequences are divided: batch x gpus x accumulation of them."""

    gpus: int
    batch: int
    accumulation: int


def share(recipe: Recipe, gpus: int) -> Share:
    """At most `batch` of the recipe at once on a GPU, and all of them every step."""
    sequences = recipe.batch * recipe.world_size
    each, left = divmod(sequences, gpus)
    batch = min(each, recipe.batch)
    if left or each % batch:
        raise InputError(
            f"{gpus} GPUs cannot share a step of {sequences} sequences ({recipe.batch} x "
            f"{recipe.world_size}) in batches of at most {recipe.batch}: use {recipe.world_size}, "
            "or a number that divides it"
        )
    return Share(gpus, batch, each // batch)


@dataclass(frozen=True)
class FlameJob:
    """One start of flame."""

    folder: Path  # of the run
    model: Mapping[str, Any]  # its config
    data: Path | str  # a packed folder
    tokens: PackedTokens  # the recipe's slice of it
    recipe: Recipe
    tokenizer: Path | str
    share: Share
    saving: Saving

    def write(self) -> list[Path]:
        """Its files; those that are kept with the result are returned."""
        write_json(self.folder / "config.json", dict(self.model))
        texts = {
            "command.txt": shlex.join(self.command()) + "\n",
            "job.toml": toml(self.sections()),
        }
        for name, text in texts.items():
            with atomic_write(self.folder / name, force=True) as aside:
                aside.write_text(text)
        return [self.folder / name for name in texts]

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes=1", f"--nproc-per-node={self.share.gpus}",
            # A free port, so that two runs on one machine do not meet.
            "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
            "--local-ranks-filter=0", f"--log-dir={self.folder / 'torchrun'}",
            "-m", flame_entry.__name__, "--job.config_file", str(self.folder / "job.toml"),
        ]  # fmt: skip

    @property
    def step_tokens(self) -> int:
        sequences = self.recipe.batch * self.recipe.world_size
        return sequences * self.tokens.manifest.sequence_length

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop"

    def sections(self) -> dict[str, dict[str, Any]]:
        """flame's job file. What is not set here is flame's default."""
        recipe, saving = self.recipe, self.saving
        length = self.tokens.manifest.sequence_length
        return {
            "job": {"dump_folder": str(self.folder / "flame"), "print_args": False},
            "model": {
                "config": str(self.folder / "config.json"),
                "tokenizer_path": str(Path(self.tokenizer).resolve()),
            },
            "optimizer": {
                "name": "AdamW",
                "lr": recipe.learning_rate,
                "beta1": recipe.betas[0],
                "beta2": recipe.betas[1],
                "eps": recipe.eps,
                "weight_decay": recipe.weight_decay,
            },
            "lr_scheduler": {
                "warmup_steps": recipe.warmup,
                "decay_type": "cosine",
                "lr_min": recipe.floor,
            },
            "training": {
                "batch_size": self.share.batch,
                "seq_len": length,
                "context_len": length,
                "gradient_accumulation_steps": self.share.accumulation,
                "steps": recipe.steps,
                "max_norm": recipe.clip,
                "skip_nan_inf": True,
                "dataset": str(Path(self.data).resolve()),
                "dataset_split": recipe.data.partition("/")[2],
                "seed": recipe.seed,
                # Of no use to packed tokens, but flame has no defaults for them.
                "pin_memory": False,
                "persistent_workers": False,
            },
            "checkpoint": {
                "enable_checkpoint": True,
                "interval": saving.steps or recipe.steps,
                "keep_latest_k": KEPT,
            },
            # Unless it is said, flame takes the selective one. Every second layer is its default.
            "activation_checkpoint": {
                "mode": recipe.activation_checkpoint,
                "selective_ac_option": "2",
            },
            "metrics": {"log_freq": 1, "disable_color_printing": True},
            "comm": {
                "init_timeout_seconds": PATIENT_SECONDS,
                "train_timeout_seconds": PATIENT_SECONDS,
            },
            # flame passes on a section that it does not know.
            "statecut": {"stop_file": str(self.stop_file), "save_seconds": saving.seconds},
        }


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Strings, numbers and truth values in TOML, which writes them as JSON does."""
    return "\n".join(
        f"[{name}]\n"
        + "".join(
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()
        )
        for name, values in sections.items()
    )
