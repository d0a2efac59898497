"""Pretraining with flame (github.com/fla-org/flame), as the paper does it.

flame is started with torchrun on the GPUs of one node (`flame_job`); `flame_entry` is what its
processes run. The folder of the run (see `checkpoints`) holds, beside the loss curve:

    command.txt, job.toml, config.json    what is run; kept beside the result as well
    flame.log                             what flame prints
    flame/checkpoint/step-40/             flame's own checkpoints, sealed with a manifest

Started again, it goes on from the last one that is whole, on the same or another number of GPUs.
flame's learning rate is one step behind the built-in trainer's on the cosine.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from reproduction.config.needs import FLAME
from reproduction.config.training import Recipe
from reproduction.pretraining.flame_job import FlameJob, share
from reproduction.pretraining.pretrain import smaller_batches
from statecut.data.packing import PackedTokens
from statecut.data.progress import Progress
from statecut.data.tokenizer import check_vocabulary, load_tokenizer
from statecut.errors import InputError
from statecut.models.architectures import architecture
from statecut.models.checkpoint import create
from statecut.recovery.checkpoints import DAMAGE, Checkpoints, verify
from statecut.recovery.loop import (
    EXIT_UNFINISHED,
    OUT_OF_MEMORY,
    PATIENCE,
    check_data,
    curve_row,
    cut_curve,
    first_sentences,
    learning_rate,
    stop_on_signals,
)
from statecut.recovery.output import Output

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds between looks at flame's log
SHOWN = 30  # lines of the log that an error shows

# Slurm's warning, SIGUSR1, goes to every process of a job, and would end torchrun.
WITHOUT_WARNINGS = ("sh", "-c", "trap '' USR1; exec \"$@\"", "sh")

STEP = re.compile(r"step: +(\d+) +loss: +(\S+) +memory: +(\S+)GiB.* tps: ([\d,]+)")
NORM = re.compile(r"lr: \S+ gnorm: +(\S+)")


@dataclass(frozen=True)
class Pace:
    """The speed of flame, as it logs it, since it was last started."""

    tokens_per_second: float  # of all GPUs together, the median step
    gibibytes: float  # the most that one GPU has reserved


def pretrain_with_flame(
    model: Mapping[str, Any], data: Path | str, recipe: Recipe, output: Output, *, gpus: int
) -> Pace | None:
    """Train a new model of the given config with flame and write it to a folder.

    `data` is a packed folder that has the recipe's slice. SIGTERM, SIGUSR1 and a deadline save and
    leave with EXIT_UNFINISHED. None if there was nothing left to train.
    """
    check_flame_installed()
    check_gpus(gpus)
    divided = share(recipe, gpus)
    output.check()
    if output.tokenizer is None:
        raise InputError("flame starts with a tokenizer: give the model's folder of it")
    # flame would widen the embedding to fit.
    check_vocabulary(load_tokenizer(output.tokenizer), model["vocab_size"])
    tokens = PackedTokens(data, slice_name=recipe.data.partition("/")[2])
    check_data(tokens, recipe.settings(), model["vocab_size"])
    run = output.checkpoints_of(
        "pretraining with flame", tokens, model=dict(model), recipe=recipe.defining()
    )
    with run as checkpoints:
        folder = checkpoints.folder
        job = FlameJob(
            folder, model, data, tokens, recipe, output.tokenizer, divided, output.saving
        )
        files = job.write()
        pace = None
        if (reached := last_whole(folder)) < recipe.steps:
            pace = run_flame(job, checkpoints, reached)
        trained = load_flame_checkpoint(checkpoint_folder(folder, recipe.steps), model)
        output.write(trained.to(getattr(torch, recipe.dtype)), checkpoints, files)
    return pace


def check_flame_installed() -> None:
    for package in FLAME:
        if find_spec(package) is None:
            raise InputError(
                f"the recipe's trainer is flame, and {package} is not installed: run `make flame`, "
                "or choose `trainer: builtin`"
            )


def check_gpus(gpus: int) -> None:
    available = torch.cuda.device_count()
    if not 1 <= gpus <= available:
        raise InputError(f"{gpus} GPUs were asked for: this machine has {available}")


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / "flame" / "checkpoint" / f"step-{step}"


def last_whole(folder: Path) -> int:
    """The step of flame's last checkpoint that is whole, 0 if there is none. Later ones are taken
    away, since flame would start from them."""
    paths = checkpoint_folder(folder, 0).parent.glob("step-*")
    for step in sorted((int(path.name.removeprefix("step-")) for path in paths), reverse=True):
        path = checkpoint_folder(folder, step)
        try:
            verify(path)
            return step
        except DAMAGE as error:
            logger.warning(f"{path.name} is skipped: {error}")
            shutil.rmtree(path)
    return 0


def run_flame(job: FlameJob, checkpoints: Checkpoints, first: int) -> Pace:
    """Run flame from a step that is saved to its last step, or until it is told to stop."""
    recipe, log = job.recipe, checkpoints.folder / "flame.log"
    job.stop_file.unlink(missing_ok=True)
    cut_curve(checkpoints.curve, first)
    command = job.command()
    logger.info(f"pretraining: resumes from step {first}" if first else "pretraining: starts flame")
    logger.info(shlex.join(command))
    last_moment = job.saving.last_moment()
    with (
        stop_on_signals() as stop,
        open(log, "ab") as sink,
        open(log, errors="replace") as lines,
        open(checkpoints.curve, "a", buffering=1) as curve,
    ):
        began = lines.seek(0, os.SEEK_END)
        reader = LogReader(job, first)
        process = subprocess.Popen(
            [*WITHOUT_WARNINGS, *command],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            # Ctrl-C is for this process, which then ends flame.
            start_new_session=True,
            # So that nobody starts the run a second time if only this process is killed.
            pass_fds=[checkpoints.held()],
        )
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY)
                curve.writelines(reader.rows(lines))
                if stop.is_set() or time.time() + reader.seconds > last_moment:
                    job.stop_file.touch()
        finally:
            process.terminate()
            code = process.wait()
        curve.writelines(reader.rows(lines))
    reached = last_whole(job.folder)
    if code == 0 and reached == recipe.steps:
        return reader.pace()
    if stop.is_set() or (code == 0 and reached > first):
        logger.info(f"pretraining: saved at step {reached}, to be resumed")
        raise SystemExit(EXIT_UNFINISHED)
    with open(log, errors="replace") as lines:
        lines.seek(began)
        printed = lines.readlines()
    if line := next((line for line in printed if OUT_OF_MEMORY in line), None):
        raise InputError(
            f"flame ended after step {reader.step}: {first_sentences(line)}; "
            f"{less_memory(recipe)}. Its whole log is {log}"
        )
    tail = "".join(printed[-SHOWN:])
    raise InputError(
        f"flame ended with code {code} after step {reader.step}; its last checkpoint is of step "
        f"{reached}. The end of {log}:\n{tail}"
    )


def less_memory(recipe: Recipe) -> str:
    """What to change where flame does not fit into a GPU."""
    modes = ("none", "selective", "full")
    more = modes[modes.index(recipe.activation_checkpoint) + 1 :]
    if not more:
        return (
            f"`activation_checkpoint` is 'full' already; {smaller_batches(recipe)}; `gpu: "
            f"{recipe.gpus}` in the profile's line of `pretrain` keeps the number of GPUs"
        )
    return (
        f"`activation_checkpoint` of the recipe is {recipe.activation_checkpoint!r}: try "
        f"{more[0]!r}, with which the run goes on from its last checkpoint"
    )


@dataclass
class LogReader:
    """What flame's log says, as it grows."""

    job: FlameJob
    step: int
    loss: float = math.nan
    failed: int = 0
    seconds: float = 0.0  # of the last step
    speeds: list[float] = field(default_factory=list)
    gibibytes: float = 0.0
    part: str = ""  # of a line that has not ended yet

    def __post_init__(self) -> None:
        left = self.job.recipe.steps - self.step
        self.progress = Progress("pretraining", tokens=left * self.job.step_tokens)

    def rows(self, log: Any) -> Iterator[str]:
        """The rows of the loss curve that new lines of the log make."""
        *lines, self.part = (self.part + log.read()).split("\n")
        for line in lines:
            if match := STEP.search(line):
                self.step, self.loss = int(match[1]), float(match[2])
                speed = float(match[4].replace(",", "")) * self.job.share.gpus
                self.gibibytes = max(self.gibibytes, float(match[3]))
                self.seconds = self.job.step_tokens / max(speed, 1)
                self.speeds.append(speed)
            elif match := NORM.search(line):
                yield self._row(float(match[1]))

    def _row(self, norm: float) -> str:
        step, loss = self.step, self.loss
        finite = math.isfinite(loss) and math.isfinite(norm)
        self.failed = 0 if finite else self.failed + 1
        if self.failed == PATIENCE:
            raise InputError(
                f"pretraining: {PATIENCE} steps in a row were not finite, the last of them step "
                f"{step} (loss {loss}, gradient norm {norm}); try a lower learning rate"
            )
        note = f"step {step:,} of {self.job.recipe.steps:,}, loss {loss:.3f}"
        self.progress.add(tokens=self.job.step_tokens, note=note)
        rate = flame_rate(step, self.job.recipe)
        return curve_row(step, step * self.job.step_tokens, loss, loss, None, rate, norm)

    def pace(self) -> Pace:
        return Pace(statistics.median(self.speeds), self.gibibytes)


def flame_rate(step: int, recipe: Recipe) -> float:
    """flame holds the peak for one step after the warm-up, and so never quite reaches the floor."""
    if step == recipe.warmup + 1:
        return recipe.learning_rate
    return learning_rate(step if step <= recipe.warmup else step - 1, recipe.settings())


def load_flame_checkpoint(folder: Path, config: Mapping[str, Any]) -> Any:
    """The model of one of flame's checkpoints, in memory."""
    model = create(dict(config), seed=0)
    weights = model.state_dict()
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = {key.removeprefix("model.") for key in metadata if key.startswith("model.")}
    if names != weights.keys():
        kind = architecture(dict(config)).model_type
        odd = ", ".join(sorted(names ^ weights.keys())[:8])
        raise InputError(f"{folder} is no checkpoint of this {kind} model; it differs in {odd}")
    with warnings.catch_warnings():
        # It is one process indeed.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": weights}, checkpoint_id=folder, no_dist=True)
    return model
