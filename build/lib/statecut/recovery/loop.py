"""The loop that pretraining and recovery share.

AdamW, a linear warm-up, a cosine to a floor, gradients clipped, steps that are not finite skipped.
It is written out here because transformers' Trainer does none of what makes a run survive: its
checkpoints are not written whole or verified, it draws its own order of the data, and it filters
non-finite losses out of its logs. Putting all that right takes more code than a loop.

Everything that a step depends on is the weights, AdamW's moments and the number of the step: the
learning rate is a function of it, and so is the batch. Hence a run that is killed and started
again computes, on a CPU with the same number of threads, the same bits as one that never was.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.config.training import Training
from statecut.data.packing import PackedTokens
from statecut.errors import InputError
from statecut.recovery.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

EXIT_UNFINISHED = 75
"""The exit code of a run that was told to stop, has saved, and goes on when started again
(EX_TEMPFAIL of sysexits.h)."""

PATIENCE = 8  # non-finite steps in a row that end a run
LOG_EVERY = 10.0  # seconds
OUT_OF_MEMORY = "out of memory"  # in whatever is said of a GPU that has none left

COLUMNS = ("step", "tokens", "loss", "ce", "kd", "lr", "grad_norm")


@dataclass(frozen=True)
class Losses:
    """The loss of a batch, and the cross-entropy and divergence that it is made of."""

    total: Tensor
    ce: Tensor
    kd: Tensor | None = None


@dataclass(frozen=True)
class Saving:
    """How often a run is saved: after so many steps or seconds, whichever comes first; and when
    it must be over.

    A run that nears its end saves and exits with EXIT_UNFINISHED. Slurm can warn by a signal too,
    but that signal ends whatever stands between Slurm and the trainer.
    """

    steps: int | None = None
    seconds: float = 600.0
    deadline: float | None = None  # seconds since 1970; by default the end of the Slurm job, if any
    reserve: float = 120.0  # seconds before it that are kept for saving and leaving

    def last_moment(self) -> float:
        """When the last step has to be over, in seconds since 1970."""
        if self.deadline is not None:
            return self.deadline - self.reserve
        return float(os.environ.get("SLURM_JOB_END_TIME", "inf")) - self.reserve


EVERY_TEN_MINUTES = Saving()


def check_data(data: PackedTokens, settings: Training, vocab_size: int) -> None:
    """An error if there is too little data for the steps, or it has tokens beyond the model's."""
    available = len(data) * settings.epochs
    if settings.sequences > available:
        passes = f" in {settings.epochs} epochs" if settings.epochs > 1 else ""
        raise InputError(
            f"{settings.data}: {settings.steps} steps need {settings.sequences} sequences, there "
            f"are {available}{passes}; ask for fewer steps, more epochs or give more text"
        )
    if data.manifest.vocabulary_size > vocab_size:
        raise InputError(
            f"{settings.data} was packed with {data.manifest.vocabulary_size} tokens, the model's "
            f"vocab_size is {vocab_size}: pack it with the model's tokenizer"
        )


def learning_rate(step: int, settings: Training) -> float:
    """The rate of step 1, 2, ...: up a line to the peak at the end of the warm-up, then down half
    a cosine to the floor at the last step."""
    if step <= settings.warmup:
        return settings.learning_rate * step / settings.warmup
    done = (step - settings.warmup) / (settings.steps - settings.warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.floor + (1 - settings.floor) * cosine)


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Losses],
    data: PackedTokens,
    settings: Training,
    checkpoints: Checkpoints,
    *,
    work: str,
    saving: Saving,
    accumulate: int = 1,
) -> None:
    """Train those parameters of the model that require gradients, from the last checkpoint on.

    `loss` is of a batch of tokens, (batch, length). A step takes `accumulate` such batches.
    SIGTERM, SIGUSR1 and a deadline save and leave with EXIT_UNFINISHED.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(trained.values())).device
    optimizer = torch.optim.AdamW(
        trained.values(),
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    # Weights and moments stay float32; on a GPU only what is computed of them is bf16.
    precision: AbstractContextManager[Any] = (
        torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    )
    first, failed = _resumed(checkpoints, trained, optimizer, device, work)
    batch = settings.sequences // settings.steps
    tokens = batch * data.manifest.sequence_length
    batches = data.batches(batch, seed=settings.seed, start=first)
    progress = StepProgress(work, settings.steps, first, tokens)
    saved, saved_at = first, time.monotonic()
    last_moment = saving.last_moment()
    model.train()
    with stop_on_signals() as stop, open(checkpoints.curve, "a", buffering=1) as curve:
        for step, ids in zip(range(first + 1, settings.steps + 1), batches, strict=False):
            began = time.time()
            rate = learning_rate(step, settings)
            losses = _gradients(loss, torch.from_numpy(ids).to(device), accumulate, precision)
            norm = nn.utils.clip_grad_norm_(trained.values(), settings.clip).item()
            finite = math.isfinite(losses[0]) and math.isfinite(norm)
            failed = 0 if finite else failed + 1
            if finite:
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
            optimizer.zero_grad()
            curve.write(curve_row(step, step * tokens, *losses, rate, norm))
            progress.log(step, losses[0])
            if failed == PATIENCE:
                raise InputError(
                    f"{work}: {PATIENCE} steps in a row were not finite, the last of them step "
                    f"{step} (loss {losses[0]}, gradient norm {norm}); try a lower learning rate. "
                    f"The checkpoints before it are in {checkpoints.folder}"
                )
            now = time.time()
            if now + (now - began) > last_moment:  # the next step takes as long as this one
                stop.set()
            if (
                stop.is_set()
                or step == settings.steps
                or (saving.steps is not None and step - saved >= saving.steps)
                or time.monotonic() - saved_at >= saving.seconds
            ):
                state = {"step": step, "failed": failed}
                checkpoints.save(step, _tensors(trained, optimizer, device), state)
                saved, saved_at = step, time.monotonic()
            if stop.is_set() and step < settings.steps:
                logger.info(f"{work}: saved at step {step}, to be resumed")
                raise SystemExit(EXIT_UNFINISHED)
    model.eval()


def _gradients(
    loss: Callable[[Tensor], Losses],
    ids: Tensor,
    accumulate: int,
    precision: AbstractContextManager[Any],
) -> tuple[float, float, float | None]:
    """Add up the gradients of a step; the means of its losses: total, cross-entropy, divergence."""
    parts = []
    for part in ids.chunk(accumulate):
        with precision:
            losses = loss(part)
        (losses.total / accumulate).backward()
        parts.append(losses)
    total = torch.stack([part.total.detach() for part in parts]).mean().item()
    ce = torch.stack([part.ce.detach() for part in parts]).mean().item()
    divergences = [part.kd.detach() for part in parts if part.kd is not None]
    return total, ce, torch.stack(divergences).mean().item() if divergences else None


def curve_row(*values: float | None) -> str:
    """A line of the loss curve; a value that is None is left empty."""
    return ",".join("" if value is None else f"{value:.9g}" for value in values) + "\n"


def _tensors(
    trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Tensor]:
    """Weights, moments and random state by name."""
    tensors = {f"weight.{name}": p.detach() for name, p in trained.items()}
    for name, parameter in trained.items():
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{moment}.{name}"] = value
    tensors["random.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _resumed(
    checkpoints: Checkpoints,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    work: str,
) -> tuple[int, int]:
    """Restore the last checkpoint: the steps done, and how many of the last were not finite."""
    saved = checkpoints.latest()
    if saved is None:
        checkpoints.curve.write_text(",".join(COLUMNS) + "\n")
        return 0, 0
    checkpoints.curve.write_text(saved.curve)
    for key, tensor in saved.tensors.items():
        part, name = key.split(".", 1)
        if key == "random.cpu":
            torch.set_rng_state(tensor)
        elif key == "random.cuda":
            torch.cuda.set_rng_state(tensor, device)
        elif part == "weight":
            trained[name].data.copy_(tensor)
        else:
            # AdamW counts its steps on the CPU.
            optimizer.state[trained[name]][part] = tensor.to("cpu" if part == "step" else device)
    step = saved.state["step"]
    logger.info(f"{work}: resumes from step {step}")
    return step, saved.state["failed"]


@contextmanager
def explain_out_of_memory(work: str, advice: str) -> Iterator[None]:
    """Turns a lack of GPU memory into one line that says what can be changed."""
    try:
        yield
    except RuntimeError as error:  # torch's own kind, or what Triton or the driver says
        if OUT_OF_MEMORY not in str(error):
            raise
        raise InputError(f"{work}: {first_sentences(str(error))}; {advice}") from None


def first_sentences(text: str) -> str:
    """Of torch's message: what it wanted to allocate, and what there was."""
    return ". ".join(text.strip().split("\n")[0].split(". ")[:3]).rstrip(".")


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM or SIGUSR1 sets, so that the current step is finished first."""
    stop = threading.Event()
    # Only the main thread may have handlers; elsewhere signals are not ours to take.
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StepProgress:
    """A line in the log every ten seconds: where the run stands and what is left."""

    def __init__(self, work: str, steps: int, step: int, tokens: int) -> None:
        self.work, self.steps, self.first, self.tokens = work, steps, step, tokens
        self.started = self.logged = time.monotonic()

    def log(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self.logged < LOG_EVERY:
            return
        self.logged = now
        pace = (step - self.first) / (now - self.started)  # steps a second
        logger.info(
            f"{self.work}: step {step:,} of {self.steps:,}, {pace * self.tokens:,.0f} tokens/s, "
            f"loss {loss:.3f}, {(self.steps - step) / pace:,.0f} s left"
        )
