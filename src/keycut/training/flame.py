"""Pretraining with flame (github.com/fla-org/flame), as the paper does it.

flame is started with torchrun on the GPUs of one node. What it is told stands in two files made
from the configuration, its job file and the model's config.json; `flame_entry` is what its
processes run. The folder of the run (see `checkpoints`) holds, beside the loss curve:

    command.txt, job.toml, config.json    what is run; kept beside the result as well
    flame.log                             what flame says
    flame/checkpoint/step-40/             flame's own checkpoints, sealed with a manifest

Started again, it goes on from the last one that is whole, on the same or another number of GPUs.
flame's learning rate is one step behind the built-in trainer's on the cosine.
"""

from __future__ import annotations

import json
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from keycut import __version__
from keycut.artefact import atomic_write, check_output_path, write_json
from keycut.config.needs import FLAME
from keycut.config.training import Recipe
from keycut.data.packing import PackedTokens
from keycut.data.tokenizer import check_vocabulary, load_tokenizer
from keycut.errors import InputError
from keycut.models.architectures import architecture
from keycut.models.checkpoint import create
from keycut.training import flame_entry
from keycut.training.checkpoints import DAMAGE, KEPT, Checkpoints, verify
from keycut.training.loop import (
    COLUMNS,
    EVERY_TEN_MINUTES,
    EXIT_UNFINISHED,
    OUT_OF_MEMORY,
    PATIENCE,
    Saving,
    StepProgress,
    check_data,
    curve_row,
    in_short,
    learning_rate,
    told_to_stop,
)
from keycut.training.pretrain import smaller_batches, write

LOOK_EVERY = 0.5  # seconds between looks at flame's log
SHOWN = 30  # lines of the log that an error shows
# A process may tune kernels for minutes, or hash a checkpoint, while the others wait for it.
PATIENT_SECONDS = 3600

# Slurm's warning, SIGUSR1, goes to every process of a job, and would end torchrun.
WITHOUT_WARNINGS = ("sh", "-c", "trap '' USR1; exec \"$@\"", "sh")

STEP = re.compile(r"step: +(\d+) +loss: +(\S+) +memory: +(\S+)GiB.* tps: ([\d,]+)")
NORM = re.compile(r"lr: \S+ gnorm: +(\S+)")


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
class Pace:
    """What flame said of its speed, since it was last started."""

    tokens_per_second: float  # of all GPUs together, the median step
    gibibytes: float  # the most that one GPU has reserved


def pretrain_with_flame(
    model: Mapping[str, Any],
    data: Path | str,
    recipe: Recipe,
    out: Path | str,
    *,
    checkpoints: Path | str,
    tokenizer: Path | str,
    gpus: int,
    card: str | None = None,
    saving: Saving = EVERY_TEN_MINUTES,
    force: bool = False,
    version: int = 1,
) -> Pace | None:
    """Train a new model of the given config with flame and write it to a folder.

    `data` is a packed folder that has the recipe's slice, `tokenizer` a folder. SIGTERM, SIGUSR1
    and a deadline save and leave with EXIT_UNFINISHED. None if there was nothing left to train.
    """
    check_flame_installed()
    check_gpus(gpus)
    divided = share(recipe, gpus)
    check_output_path(out, force=force)
    # flame would widen the embedding to fit.
    check_vocabulary(load_tokenizer(tokenizer), model["vocab_size"])
    tokens = PackedTokens(data, slice_name=recipe.data.partition("/")[2])
    check_data(tokens, recipe, model["vocab_size"])
    run = {
        "work": "pretraining with flame",
        "model": dict(model),
        "recipe": recipe.defining(),
        "data": {"sha256": tokens.manifest.sha256, "sequences": len(tokens)},
        "version": version,
        "keycut": __version__,
    }
    with Checkpoints(checkpoints, run) as kept:
        files = write_files(kept.folder, model, data, tokens, recipe, tokenizer, divided, saving)
        done = last_whole(kept.folder)
        pace = None
        if done < recipe.steps:
            pace = run_flame(kept, recipe, divided, tokens.manifest.sequence_length, saving, done)
        trained = converted(checkpoint_folder(kept.folder, recipe.steps), model)
        write(trained, out, kept, tokenizer=tokenizer, card=card, force=force, beside=files)
    return pace


def check_flame_installed() -> None:
    for package in FLAME:
        if find_spec(package) is None:
            raise InputError(
                f"the recipe's trainer is flame, and {package} is not installed: run `make flame`, "
                "or choose `trainer: builtin`"
            )


def check_gpus(gpus: int) -> None:
    there = torch.cuda.device_count()
    if not 1 <= gpus <= there:
        raise InputError(f"{gpus} GPUs were asked for: this machine has {there}")


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / "flame" / "checkpoint" / f"step-{step}"


def write_files(
    folder: Path,
    model: Mapping[str, Any],
    data: Path | str,
    tokens: PackedTokens,
    recipe: Recipe,
    tokenizer: Path | str,
    divided: Share,
    saving: Saving,
) -> list[Path]:
    """What flame is told: its command, its job file and the model's config."""
    write_json(folder / "config.json", dict(model))
    sections = job(folder, data, tokens, recipe, tokenizer, divided, saving)
    for name, text in (
        ("job.toml", toml(sections)),
        ("command.txt", shlex.join(command(folder, divided.gpus)) + "\n"),
    ):
        with atomic_write(folder / name, force=True) as aside:
            aside.write_text(text)
    return [folder / "command.txt", folder / "job.toml"]


def command(folder: Path, gpus: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes=1", f"--nproc-per-node={gpus}",
        # A free port, so that two runs on one machine do not meet.
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
        "--local-ranks-filter=0", f"--log-dir={folder / 'torchrun'}",
        "-m", flame_entry.__name__, "--job.config_file", str(folder / "job.toml"),
    ]  # fmt: skip


def job(
    folder: Path,
    data: Path | str,
    tokens: PackedTokens,
    recipe: Recipe,
    tokenizer: Path | str,
    divided: Share,
    saving: Saving,
) -> dict[str, dict[str, Any]]:
    """flame's job file, in sections. What stands nowhere here is as flame has it."""
    length = tokens.manifest.sequence_length
    return {
        "job": {"dump_folder": str(folder / "flame"), "print_args": False},
        "model": {
            "config": str(folder / "config.json"),
            "tokenizer_path": str(Path(tokenizer).resolve()),
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
            "batch_size": divided.batch,
            "seq_len": length,
            "context_len": length,
            "gradient_accumulation_steps": divided.accumulation,
            "steps": recipe.steps,
            "max_norm": recipe.clip,
            "skip_nan_inf": True,
            "dataset": str(Path(data).resolve()),
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
        "activation_checkpoint": {"mode": recipe.activation_checkpoint, "selective_ac_option": "2"},
        "metrics": {"log_freq": 1, "disable_color_printing": True},
        "comm": {
            "init_timeout_seconds": PATIENT_SECONDS,
            "train_timeout_seconds": PATIENT_SECONDS,
        },
        # flame passes on a section that it does not know.
        "keycut": {"stop_file": str(folder / "stop"), "save_seconds": saving.seconds},
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


def last_whole(folder: Path) -> int:
    """The step of flame's last checkpoint that is whole, 0 if there is none. Later ones are taken
    away, since flame would start from them."""
    there = checkpoint_folder(folder, 0).parent.glob("step-*")
    steps = sorted((int(path.name.removeprefix("step-")) for path in there), reverse=True)
    for step in steps:
        path = checkpoint_folder(folder, step)
        try:
            verify(path)
            return step
        except DAMAGE as error:
            _say(f"{path.name} is passed over: {error}")
            shutil.rmtree(path)
    return 0


def run_flame(
    kept: Checkpoints, recipe: Recipe, divided: Share, length: int, saving: Saving, done: int
) -> Pace:
    """Run flame to its last step, or until it is told to stop."""
    stop_file, log = kept.folder / "stop", kept.folder / "flame.log"
    stop_file.unlink(missing_ok=True)
    _cut_curve(kept.curve, done)
    words = command(kept.folder, divided.gpus)
    _say(f"pretraining: goes on from step {done}" if done else "pretraining: starts flame")
    _say(shlex.join(words))
    last_moment = saving.last_moment()
    with (
        told_to_stop() as stop,
        open(log, "ab") as sink,
        open(log, errors="replace") as lines,
        open(kept.curve, "a", buffering=1) as curve,
    ):
        began = lines.seek(0, os.SEEK_END)
        watch = _Watch(recipe, divided, length, done)
        process = subprocess.Popen(
            [*WITHOUT_WARNINGS, *words],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            # Ctrl-C is for this process, which then ends flame.
            start_new_session=True,
            # So that nobody starts the run a second time if only this process is killed.
            pass_fds=[kept.held()],
        )
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY)
                curve.writelines(watch.rows(lines))
                if stop.is_set() or time.time() + watch.seconds > last_moment:
                    stop_file.touch()
        finally:
            process.terminate()
            code = process.wait()
        curve.writelines(watch.rows(lines))
    reached = last_whole(kept.folder)
    if code == 0 and reached == recipe.steps:
        return watch.pace()
    if stop.is_set() or (code == 0 and reached > done):
        _say(f"pretraining: saved at step {reached}, goes on later")
        raise SystemExit(EXIT_UNFINISHED)
    with open(log, errors="replace") as lines:
        lines.seek(began)
        said = lines.readlines()
    if line := next((line for line in said if OUT_OF_MEMORY in line), None):
        raise InputError(
            f"flame ended after step {watch.step}: {in_short(line)}; {less_memory(recipe)}. "
            f"All that it said is in {log}"
        )
    tail = "".join(said[-SHOWN:])
    raise InputError(
        f"flame ended with code {code} after step {watch.step}; its last checkpoint is of step "
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
class _Watch:
    """What flame's log says, as it grows."""

    recipe: Recipe
    divided: Share
    length: int
    step: int
    loss: float = math.nan
    failed: int = 0
    seconds: float = 0.0  # of the last step
    speeds: list[float] = field(default_factory=list)
    gibibytes: float = 0.0
    part: str = ""

    def __post_init__(self) -> None:
        self.tokens = self.recipe.batch * self.recipe.world_size * self.length
        self.progress = StepProgress("pretraining", self.recipe.steps, self.step, self.tokens)

    def rows(self, log: Any) -> Iterator[str]:
        """The rows of the loss curve that new lines of the log make."""
        *lines, self.part = (self.part + log.read()).split("\n")
        for line in lines:
            if said := STEP.search(line):
                self.step, self.loss = int(said[1]), float(said[2])
                speed = float(said[4].replace(",", "")) * self.divided.gpus
                self.gibibytes = max(self.gibibytes, float(said[3]))
                self.seconds = self.tokens / max(speed, 1)
                self.speeds.append(speed)
            elif said := NORM.search(line):
                yield self._row(float(said[1]))

    def _row(self, norm: float) -> str:
        finite = math.isfinite(self.loss) and math.isfinite(norm)
        self.failed = 0 if finite else self.failed + 1
        if self.failed == PATIENCE:
            raise InputError(
                f"pretraining: {PATIENCE} steps in a row were not finite, the last of them step "
                f"{self.step} (loss {self.loss}, gradient norm {norm}); try a lower learning rate"
            )
        self.progress.say(self.step, self.loss)
        rate = flame_rate(self.step, self.recipe)
        return curve_row(self.step, self.step * self.tokens, self.loss, self.loss, None, rate, norm)

    def pace(self) -> Pace:
        return Pace(statistics.median(self.speeds), self.gibibytes)


def flame_rate(step: int, recipe: Recipe) -> float:
    """flame holds the peak for one step after the warm-up, and so never quite reaches the floor."""
    if step == recipe.warmup + 1:
        return recipe.learning_rate
    return learning_rate(step if step <= recipe.warmup else step - 1, recipe)


def _cut_curve(curve: Path, done: int) -> None:
    """The loss curve up to a step, or an empty one."""
    rows = curve.read_text().splitlines(keepends=True)[1:] if curve.exists() else []
    whole_rows = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= done]
    curve.write_text(",".join(COLUMNS) + "\n" + "".join(whole_rows))


def converted(folder: Path, config: Mapping[str, Any]) -> Any:
    """The model of one of flame's checkpoints, in memory."""
    model = create(dict(config), seed=0)
    weights = model.state_dict()
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    there = {key.removeprefix("model.") for key in metadata if key.startswith("model.")}
    if there != weights.keys():
        kind = architecture(dict(config)).model_type
        odd = ", ".join(sorted(there ^ weights.keys())[:8])
        raise InputError(f"{folder} is no checkpoint of this {kind} model; it differs in {odd}")
    with warnings.catch_warnings():
        # It is one process indeed.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": weights}, checkpoint_id=folder, no_dist=True)
    return model


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
