"""Pretraining with flame (github.com/fla-org/flame), as the paper does it.

flame runs under torchrun on the GPUs of one node; `flame_entry` is what its processes run. The
folder of the run (`statecut.recovery.checkpoints`) holds, beside the loss curve:

    command.txt, job.toml, config.json    what is run; the first two are kept beside the result
    flame.log                             what flame prints
    flame/checkpoint/step-40/             flame's own checkpoints
    stop                                  tells flame to save and end

Started again, it goes on from the last whole checkpoint, on the same or another number of GPUs.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from reproduction.config.training import Recipe
from reproduction.pretraining import flame_entry
from statecut.data.packing import PackedTokens
from statecut.data.progress import Progress
from statecut.data.tokenizer import check_vocabulary, load_tokenizer
from statecut.errors import InputError
from statecut.files import write_json
from statecut.models.checkpoint import create
from statecut.recovery import loop
from statecut.recovery.checkpoints import Checkpoints, Output

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds between looks at flame's log
SHOWN = 30  # lines of the log that an error shows
# A process may tune kernels for minutes while the others wait for it.
PATIENT_SECONDS = 3600
# Slurm's warning, SIGUSR1, goes to every process of a job, and would end torchrun.
WITHOUT_WARNINGS = ("sh", "-c", "trap '' USR1; exec \"$@\"", "sh")

LESS_MEMORY = (
    "raise `activation_checkpoint` of the recipe (none, selective, full) and start again, or halve "
    "its `batch` and double `world_size`, which starts anew"
)
STEP = re.compile(r"step: +(\d+) +loss: +(\S+) +memory: +(\S+)GiB.* tps: ([\d,]+)")
NORM = re.compile(r"lr: \S+ gnorm: +(\S+)")


def pretrain_with_flame(
    model: Mapping[str, Any], data: Path | str, recipe: Recipe, output: Output, *, gpus: int
) -> None:
    """Train a new model of the given config with flame and write it to a folder.

    `data` is a packed folder that has the recipe's slice. Ctrl-C, SIGTERM, SIGUSR1 and a deadline
    save and leave with EXIT_UNFINISHED.
    """
    share(recipe, gpus)  # refuses what cannot be shared
    output.check()
    assert output.tokenizer is not None
    # flame would widen the embedding to fit.
    check_vocabulary(load_tokenizer(output.tokenizer), model["vocab_size"])
    tokens = PackedTokens(data, slice_name=recipe.data.partition("/")[2])
    loop.check_data(tokens, recipe.settings(), model["vocab_size"])
    run = output.checkpoints_of(
        "pretraining with flame", tokens, model=dict(model), recipe=recipe.defining()
    )
    with run as checkpoints:
        folder = checkpoints.folder
        command = write_job(folder, model, data, recipe, output, gpus)
        reached = last_whole(folder)
        if reached < recipe.steps:
            step_tokens = recipe.batch * recipe.world_size * tokens.manifest.sequence_length
            run_flame(command, checkpoints, LogReader(recipe, step_tokens, gpus, reached))
        trained = load_flame_checkpoint(checkpoint_folder(folder, recipe.steps), model)
        files = [folder / "command.txt", folder / "job.toml"]
        output.write(trained.to(getattr(torch, recipe.dtype)), checkpoints, files)


def share(recipe: Recipe, gpus: int) -> tuple[int, int]:
    """Sequences at once on each GPU, at most `batch` of the recipe, and how often in a step."""
    sequences = recipe.batch * recipe.world_size
    each, left = divmod(sequences, gpus)
    batch = min(each, recipe.batch)
    if left or each % batch:
        raise InputError(
            f"{gpus} GPUs cannot share a step of {sequences} sequences ({recipe.batch} x "
            f"{recipe.world_size}) in batches of at most {recipe.batch}: use {recipe.world_size}, "
            "or a number that divides it"
        )
    return batch, each // batch


def write_job(
    folder: Path, model: Mapping[str, Any], data: Path | str, recipe: Recipe, output: Output,
    gpus: int,
) -> list[str]:  # fmt: skip
    """The files that flame reads, and its command. What is not set here is flame's default."""
    batch, accumulation = share(recipe, gpus)
    length = PackedTokens(data).manifest.sequence_length
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder / "flame"), "print_args": False},
        "model": {"config": str(folder / "config.json"),
                  "tokenizer_path": str(Path(output.tokenizer or "").resolve())},
        "optimizer": {"name": "AdamW", "lr": recipe.learning_rate, "beta1": recipe.betas[0],
                      "beta2": recipe.betas[1], "eps": recipe.eps,
                      "weight_decay": recipe.weight_decay},
        "lr_scheduler": {"warmup_steps": recipe.warmup, "decay_type": "cosine",
                         "lr_min": recipe.floor},
        "training": {
            "batch_size": batch, "gradient_accumulation_steps": accumulation,
            "seq_len": length, "context_len": length, "steps": recipe.steps,
            "max_norm": recipe.clip, "skip_nan_inf": True, "seed": recipe.seed,
            "dataset": str(Path(data).resolve()), "dataset_split": recipe.data.partition("/")[2],
            # Of no use to packed tokens, but flame has no defaults for them.
            "pin_memory": False, "persistent_workers": False,
        },
        # torchtitan keeps no fewer than two.
        "checkpoint": {"enable_checkpoint": True, "keep_latest_k": 2, "interval": recipe.steps},
        # Without a mode flame takes the selective one. Every second layer is its default.
        "activation_checkpoint": {"mode": recipe.activation_checkpoint, "selective_ac_option": "2"},
        "metrics": {"log_freq": 1, "disable_color_printing": True},
        "comm": {"init_timeout_seconds": PATIENT_SECONDS, "train_timeout_seconds": PATIENT_SECONDS},
        # flame passes on a section that it does not know.
        "statecut": {"stop_file": str(folder / "stop"), "save_seconds": output.save_seconds},
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={gpus}",
        # A free port, so that two runs on one machine do not meet.
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
        "--local-ranks-filter=0", f"--log-dir={folder / 'torchrun'}",
        "-m", flame_entry.__name__, "--job.config_file", str(folder / "job.toml"),
    ]  # fmt: skip
    write_json(folder / "config.json", dict(model))
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    (folder / "job.toml").write_text(toml(sections))
    return command


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Strings, numbers and truth values in TOML, which writes them as JSON does."""
    lines = []
    for name, values in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(v, ensure_ascii=False)}" for key, v in values.items()]
    return "\n".join(lines) + "\n"


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / "flame" / "checkpoint" / f"step-{step}"


def last_whole(folder: Path) -> int:
    """The step of flame's last checkpoint that is whole, 0 if there is none: torch renames its
    `.metadata` into place once the rest is on the disk. What is not whole is removed, since
    torchtitan would count it among those that it keeps."""
    last = 0
    for path in checkpoint_folder(folder, 0).parent.glob("step-*"):
        if (path / ".metadata").exists():
            last = max(last, int(path.name.removeprefix("step-")))
        else:
            shutil.rmtree(path)
    return last


def run_flame(command: list[str], checkpoints: Checkpoints, reader: LogReader) -> None:
    """Run flame from a step that is saved to its last step, or until it is told to stop."""
    first, recipe = reader.step, reader.recipe
    log, stop_file = checkpoints.folder / "flame.log", checkpoints.folder / "stop"
    stop_file.unlink(missing_ok=True)
    loop.cut_curve(checkpoints.curve, first)
    logger.info(f"pretraining: resumes from step {first}" if first else "pretraining: starts flame")
    logger.info(shlex.join(command))
    with (
        loop.stop_on_signals() as stop,
        open(log, "ab") as sink,
        open(log, errors="replace") as lines,
        open(checkpoints.curve, "a", buffering=1) as curve,
    ):
        began = lines.seek(0, os.SEEK_END)
        progress = Progress("pretraining", tokens=(recipe.steps - first) * reader.step_tokens)
        process = subprocess.Popen(
            [*WITHOUT_WARNINGS, *command],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for this process, which then ends flame
            # So that nobody starts the run a second time if only this process is killed.
            pass_fds=[checkpoints.lock],
        )
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY)
                curve.writelines(reader.rows(lines))
                if done := (reader.step - first) * reader.step_tokens - progress.tokens:
                    note = f"step {reader.step:,} of {recipe.steps:,}, loss {reader.loss:.3f}"
                    progress.add(tokens=done, note=note)
                if stop.is_set() or time.time() + reader.seconds > loop.last_moment():
                    stop_file.touch()
        finally:
            process.terminate()
            code = process.wait()
        curve.writelines(reader.rows(lines))
        lines.seek(began)
        printed = lines.readlines()
    reached = last_whole(checkpoints.folder)
    if code == 0 and reached == recipe.steps:
        speed = statistics.median(reader.speeds)
        logger.info(f"flame: {speed:,.0f} tokens/s, {reader.gibibytes:.1f} GiB of each GPU")
        return
    if stop.is_set() or (code == 0 and reached > first):
        logger.info(f"pretraining: saved at step {reached}, to be resumed")
        raise SystemExit(loop.EXIT_UNFINISHED)
    full = next((line for line in printed if loop.OUT_OF_MEMORY in line), None)
    advice = f"\n{loop.first_sentences(full)}; {LESS_MEMORY}" if full else ""
    raise InputError(
        f"flame ended with code {code} after step {reader.step}; its last checkpoint is of step "
        f"{reached}. The end of {log}:\n{''.join(printed[-SHOWN:])}{advice}"
    )


@dataclass
class LogReader:
    """What flame's log says, as it grows."""

    recipe: Recipe
    step_tokens: int
    gpus: int
    step: int
    loss: float = math.nan
    failed: int = 0
    seconds: float = 0.0  # of the last step
    speeds: list[float] = field(default_factory=list)
    gibibytes: float = 0.0
    part: str = ""  # of a line that has not ended yet

    def rows(self, log: Any) -> Iterator[str]:
        """The rows of the loss curve that new lines of the log make."""
        *lines, self.part = (self.part + log.read()).split("\n")
        for line in lines:
            if match := STEP.search(line):
                self.step, self.loss = int(match[1]), float(match[2])
                self.speeds.append(float(match[4].replace(",", "")) * self.gpus)
                self.gibibytes = max(self.gibibytes, float(match[3]))
                self.seconds = self.step_tokens / max(self.speeds[-1], 1)
            elif match := NORM.search(line):
                step, loss, norm = self.step, self.loss, float(match[1])
                self.failed = 0 if math.isfinite(loss + norm) else self.failed + 1
                if self.failed == loop.PATIENCE:
                    raise InputError(
                        f"pretraining: {loop.PATIENCE} steps in a row were not finite, the last of "
                        f"them step {step} (loss {loss}, gradient norm {norm}); try a lower "
                        "learning rate"
                    )
                rate = flame_rate(step, self.recipe)
                yield loop.curve_row(step, step * self.step_tokens, loss, loss, None, rate, norm)


def flame_rate(step: int, recipe: Recipe) -> float:
    """flame holds the peak for one step after the warm-up, and so never quite reaches the floor:
    on the cosine it is one step behind the built-in trainer."""
    if step == recipe.warmup + 1:
        return recipe.learning_rate
    return loop.learning_rate(step if step <= recipe.warmup else step - 1, recipe.settings())


def load_flame_checkpoint(folder: Path, config: Mapping[str, Any]) -> Any:
    """The model of one of flame's checkpoints, in memory."""
    model = create(dict(config), seed=0)
    with warnings.catch_warnings():
        # It is a single process, as it should be.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    return model
